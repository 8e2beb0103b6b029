"""The optimizer of a model: its parameter groups, what updates them, and where their state is kept."""

import logging
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from torchtitan_cp.config.training import Optimizer as OptimizerConfig
from torchtitan_cp.optim.offload import keep_state_on_host
from torchtitan_cp.optim.optimizers import OPTIMIZERS, Groups
from torchtitan_cp.optim.rules import rule_of

logger = logging.getLogger(__name__)


def build_optimizer(
    model: nn.Module, settings: OptimizerConfig, *, compute_dtype: torch.dtype = torch.float32
) -> Optimizer:
    """The optimizer that [optimizer] asks for, over the model's parameters, sharded or not.

    Its groups hold `lr_scale`, which `set_learning_rates` applies.

    Args:
        model: has `layers`, if the optimizer is one of their matrices alone.
        compute_dtype: that the optimizer may compute in.

    Raises:
        ConfigError: the package of an extra is missing.
    """
    kind = OPTIMIZERS[settings.name]
    optimizer = kind.build(_parameter_groups(model, settings), settings, compute_dtype)
    if settings.offload_state:
        if next(model.parameters()).device.type == "cpu":
            logger.warning("optimizer.offload_state is inactive: the optimizer's state is in host memory on a CPU")
        else:
            keep_state_on_host(optimizer, kind.parts)
    set_learning_rates(optimizer, settings.lr)
    return optimizer


def set_learning_rates(optimizer: Optimizer, lr: float) -> None:
    """Give each group lr times its `lr_scale`."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * group["lr_scale"])
        else:
            group["lr"] = lr * group["lr_scale"]


def _parameter_groups(model: nn.Module, settings: OptimizerConfig) -> Groups:
    """Trained parameters with the same settings share a group. By default matrices decay, norms and biases do not."""
    blocks_only = OPTIMIZERS[settings.name].blocks_only
    blocks: Iterable[Tensor] = model.layers.parameters() if blocks_only else ()  # type: ignore[union-attr]
    # Experts are known by their module, as convolutions have three dims too.
    experts = {parameter for module in getattr(model, "experts", {}).values() for parameter in module.parameters()}
    of_blocks = {parameter for parameter in blocks if parameter.ndim == 2 or parameter in experts}
    groups: dict[tuple[float, float, bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rule = rule_of(name, settings.groups)
        # Biases of experts and norms of each head have two dims and are no matrices.
        is_matrix = parameter.ndim >= 2 and not re.search(r"bias$|norm\d*\.weight$", name)
        default = settings.weight_decay if is_matrix else 0.0
        decay = default if rule.weight_decay is None else rule.weight_decay
        # One fused update takes tensors of one mesh.
        mesh = getattr(parameter, "device_mesh", None)
        groups.setdefault((rule.lr_scale, decay, is_matrix and parameter in of_blocks, mesh), []).append(parameter)
    return [
        {"params": parameters, "lr_scale": lr_scale, "weight_decay": decay}
        | ({settings.name: of_block} if blocks_only else {})
        for (lr_scale, decay, of_block, _), parameters in groups.items()
    ]
