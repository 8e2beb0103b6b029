"""The optimizer of a model: its parameter groups, what updates them, and where their state is kept."""

import logging
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtitan_cp.config import sections
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.optim.muon import Muon
from torchtitan_cp.optim.offload import keep_state_on_host
from torchtitan_cp.optim.rules import rule_of

logger = logging.getLogger(__name__)

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def build_optimizer(
    model: nn.Module, settings: sections.Optimizer, *, compute_dtype: torch.dtype = torch.float32
) -> Optimizer:
    """The optimizer that [optimizer] asks for, over the model's parameters, sharded or not.

    Its groups hold `lr_scale`, which `set_learning_rates` applies.

    Args:
        model: with settings.name = "muon" it has `layers`, whose matrices Muon updates.
        compute_dtype: Muon orthogonalises in this dtype.

    Raises:
        ConfigError: torchao is missing.

    Source: AdamW, Loshchilov and Hutter, 2019; its 8-bit state, Dettmers et al., 2022; Muon: see muon.py.
    """
    groups = _parameter_groups(model, settings)
    optimizer = _adamw([group for group in groups if not group["muon"]], settings)
    if settings.name == "muon":
        matrices = [group for group in groups if group["muon"]]
        optimizer = Muon(matrices, optimizer, momentum=settings.muon_momentum, dtype=compute_dtype)
    if settings.offload_state:
        if next(model.parameters()).device.type == "cpu":
            logger.warning("optimizer.offload_state is inactive: the optimizer's state is in host memory on a CPU")
        else:
            keep_state_on_host(optimizer)
    set_learning_rates(optimizer, settings.lr)
    return optimizer


def set_learning_rates(optimizer: Optimizer, lr: float) -> None:
    """Give each group lr times its `lr_scale`."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * group["lr_scale"])
        else:
            group["lr"] = lr * group["lr_scale"]


def _adamw(groups: list[dict[str, Any]], settings: sections.Optimizer) -> Optimizer:
    options: dict[str, Any] = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    if settings.state == "8bit":
        torchao = import_extra("torchao.optim", extra="float8", needed_by="optimizer.state = '8bit'")
        return torchao.AdamW8bit(groups, **options)
    return torch.optim.AdamW(groups, **options, **IMPLEMENTATIONS[settings.implementation])


def _parameter_groups(model: nn.Module, settings: sections.Optimizer) -> list[dict[str, Any]]:
    """Parameters with the same settings share a group. By default matrices decay, norms and biases do not."""
    blocks: Iterable[Tensor] = model.layers.parameters() if settings.name == "muon" else ()  # type: ignore[union-attr]
    # Experts are known by their module, as convolutions have three dims too.
    experts = {parameter for module in getattr(model, "experts", {}).values() for parameter in module.parameters()}
    muon_parameters = {parameter for parameter in blocks if parameter.ndim == 2 or parameter in experts}
    groups: dict[tuple[float, float, bool, Any], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        rule = rule_of(name, settings.groups)
        # Biases of experts and norms of each head have two dims and are no matrices.
        is_matrix = parameter.ndim >= 2 and not re.search(r"bias$|norm\d*\.weight$", name)
        default = settings.weight_decay if is_matrix else 0.0
        decay = default if rule.weight_decay is None else rule.weight_decay
        # One fused update takes tensors of one mesh.
        mesh = getattr(parameter, "device_mesh", None)
        by_muon = is_matrix and parameter in muon_parameters
        groups.setdefault((rule.lr_scale, decay, by_muon, mesh), []).append(parameter)
    return [
        {"params": parameters, "lr_scale": lr_scale, "weight_decay": decay, "muon": muon}
        for (lr_scale, decay, muon, _), parameters in groups.items()
    ]
