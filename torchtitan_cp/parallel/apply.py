"""Prepares a plain model to train on these ranks: adapters, tensor parallelism, recomputation, FSDP, first weights."""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from torchtitan_cp.attention.local_shard import local_tensor, shard_slices
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.contract import LanguageModel
from torchtitan_cp.parallel.blocks import wrap_blocks
from torchtitan_cp.parallel.experts import shard_experts
from torchtitan_cp.parallel.float8 import convert_linears
from torchtitan_cp.parallel.lora import ADAPTER_NAMES, BASE_DTYPE, add_adapters, draw_adapter
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.parallel.nf4 import PARAMETER as NF4_PARAMETER
from torchtitan_cp.parallel.nf4 import NF4Linear, check_nf4, fill_tables
from torchtitan_cp.parallel.tensor import apply_tensor_parallel, enable_async_tp

logger = logging.getLogger(__name__)


def parallelize(model: LanguageModel, meshes: Meshes, roles: Mapping[str, str], config: Config) -> None:
    """Prepare a model on the meta device to train, in place.

    Args:
        model: has `layers` with `mlp`, and `init_std`; see models/architecture.py. With [lora] it is frozen by now.
        roles: the architecture's plan for tensor parallelism.
    """
    if config.training.float8 != "none":
        convert_linears(model, config.training.float8, meshes.device_type)
    if config.lora and config.lora.base == "nf4":
        check_nf4()
    if meshes.tp:
        apply_tensor_parallel(model, roles, meshes.tp)
        if config.parallel.async_tp:
            enable_async_tp(meshes.tp)
    experts = meshes.experts if getattr(model, "experts", None) else None
    if experts and config.parallel.ep > 1:
        shard_experts(model, experts[0])
    if config.lora:
        add_adapters(model, config.lora)  # sharded as their layers are by now
    if meshes.tp and config.compile.enable:
        # torch's cache on disk is keyed by whole DTensors (2.13): a rank could load code for another rank's device, or
        # for a shard of another size or kind. Source: pytorch/pytorch issue 188390.
        functorch_config.enable_autograd_cache = False
    wrap_blocks(model, config.activation, config.compile, meshes.device_type, config.parallel.ep)
    on_host = config.parallel.fsdp_cpu_offload and meshes.device_type != "cpu"
    if config.parallel.fsdp_cpu_offload and not on_host:
        logger.warning("parallel.fsdp_cpu_offload is inactive: on a CPU the weights are in host memory")
    apply_fsdp(model, meshes.fsdp, config, on_host, experts[1] if experts else None)
    model.to_empty(device="cpu" if on_host else meshes.device_type)
    if on_host:
        move_buffers(model, torch.device(meshes.device_type))
    fill_tables(model, torch.device(meshes.device_type))
    init_weights(model, config.training.seed, loads=config.model.loads_weights)


def apply_fsdp(
    model: nn.Module, mesh: DeviceMesh, config: Config, on_host: bool, experts_mesh: DeviceMesh | None = None
) -> None:
    """FSDP2 by block. Gradients are summed, never averaged: the loss is divided once, by all its tokens.

    Args:
        on_host: weights, gradients and optimizer state live in host memory.
        experts_mesh: ranks that the experts are sharded over; None: like the rest.
    """
    # Inputs are not cast: rotary cos and sin stay fp32 beside a bf16 residual stream.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.training.compute_dtype),
        reduce_dtype=getattr(torch, config.training.reduce_dtype),
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy() if on_host else OffloadPolicy()
    frees_blocks = config.parallel.fsdp_reshard == "always" or (
        config.parallel.fsdp_reshard == "auto" and config.parallel.pp == 1
    )
    layers = list(model.layers.values())  # type: ignore[operator]
    modules = [(module, mesh) for module in (*shared_modules(layers), *layers, model)]
    if experts_mesh:
        modules = [(module, experts_mesh) for module in model.experts.values()] + modules  # type: ignore[operator]

    def placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
        """Shard experts by dim 1 where the ranks cannot share dim 0 evenly; None: dim 0."""
        uneven = parameter.ndim == 3 and len(local_tensor(parameter)) % ranks and parameter.shape[1] % ranks == 0
        return Shard(1) if uneven else None

    for module, module_mesh in modules:
        fully_shard(
            module,
            mesh=module_mesh,
            mp_policy=policy,
            offload_policy=offload,
            # The output layer runs last in forward and first in backward: the root stays gathered.
            reshard_after_forward=frees_blocks and module is not model,
            shard_placement_fn=partial(placement, module_mesh.size(module_mesh.ndim - 1)),
        )
        if module_mesh.size() > 1:  # one rank would divide its gradients by 1, a pass over them
            module.set_gradient_divide_factor(1.0)
        else:
            module.set_custom_reduce_scatter(OneRankReduceScatter())
        # gloo has no scaled sum, which a divide factor would otherwise ask for.
        module.set_force_sum_reduction_for_comms(True)


class OneRankReduceScatter:
    """FSDP's buffers for the gradients of a group of parameters where one rank has them all: one in place of two.

    FSDP copies gradients to a buffer in the dtype of the reduction, asks for another one to reduce them to, and with
    one rank copies the first to the second. A copy of a tensor to itself does nothing: that saves 8 bytes a parameter
    of traffic, and 4 of memory.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer that gradients are copied to, `[N]`, and when FSDP asks again the same for their sums."""
        if self.buffer is None:
            self.buffer = torch.empty(*size, dtype=dtype, device=device)
            return self.buffer
        buffer, self.buffer = self.buffer, None
        if torch.cuda.is_available() and buffer.is_cuda:  # FSDP reduces, adds up and offloads on a stream of its own
            buffer.record_stream(torch.cuda.current_stream(device))
        return buffer


def shared_modules(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The outermost modules that several layers have in common."""
    layers_with = Counter(module for layer in layers for module in layer.modules())
    shared = [module for module, count in layers_with.items() if count > 1 and any(True for _ in module.parameters())]
    inner = {part for module in shared for part in module.modules() if part is not module}
    return [module for module in shared if module not in inner]


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers to a device: FSDP keeps only parameters on the host, and each forward reads buffers."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that the model's parameters are its shards again, as they are after a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, *, loads: bool = False) -> None:
    """Draw each parameter from its own generator, seeded by its name; each rank keeps its shard.

    So the weights depend on the seed and the device type alone, not on the number of ranks. Values are normal,
    truncated at three standard deviations.

    Args:
        loads: trained weights will replace these.

    Raises:
        ConfigError: the model does not initialize a parameter, and nothing is loaded.
    """
    for name, parameter in model.named_parameters():
        # On the GPU even if weights are offloaded: the CPU's generator would draw different values.
        device = torch.device("cuda") if torch.cuda.is_available() else parameter.device
        owner, _, leaf = name.rpartition(".")
        if leaf in ADAPTER_NAMES:
            values = draw_adapter(name, parameter, _parameter_seed(seed, name), device)
        elif leaf == NF4_PARAMETER:
            layer = model.get_submodule(owner)
            assert isinstance(layer, NF4Linear)
            if not loads:  # quantizing takes its time
                whole = torch.empty((layer.out_features, layer.in_features), dtype=BASE_DTYPE, device="meta")
                layer.store(_draw_weight(model, f"{owner}.weight", whole, seed, device, loads=False))
            continue
        else:
            values = _draw_weight(model, name, parameter, seed, device, loads=loads)
        local_tensor(parameter).copy_(values[shard_slices(parameter)])


def _parameter_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def _draw_weight(
    model: nn.Module, name: str, parameter: Tensor, seed: int, device: torch.device, *, loads: bool
) -> Tensor:
    """The first values of a whole weight; those of a model of transformers are fp32."""
    parameter_seed = _parameter_seed(seed, name)
    if hasattr(model, "init_parameter"):
        drawn: Tensor = model.init_parameter(name, parameter_seed, device)  # type: ignore[operator]
        if not loads and drawn.isnan().any():
            raise ConfigError(
                f"transformers does not initialize {name}",
                fix="start from trained weights: set model.hub_checkpoint, with model.load_weights = true",
            )
        return drawn
    std = model.init_std(name)  # type: ignore[operator]
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    if not std:
        return values.fill_(1.0 if std is None else 0.0)
    generator = torch.Generator(values.device).manual_seed(parameter_seed)
    return nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
