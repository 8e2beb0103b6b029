"""What is done to a plain model before it trains, in this order: recompute, shard, allocate, fill."""

import hashlib
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint


def parallelize(
    model: nn.Module, fsdp_mesh: DeviceMesh, *, compute_dtype: torch.dtype, recompute: bool, seed: int
) -> None:
    """Make a model on the meta device ready to train on a mesh, in place.

    Args:
        model: has `layers` and `init_std`; see models/architecture.py.
        fsdp_mesh: 1-D, the ranks its parameters are sharded over.
        compute_dtype: of forward and backward; parameters, gradients and reductions are fp32.
        recompute: keep only each block's input, and run the block again in backward.
        seed: of the weights, which are the same on every layout.
    """
    if recompute:
        recompute_blocks(model)
    shard(model, fsdp_mesh, compute_dtype)
    model.to_empty(device=fsdp_mesh.device_type)
    fill(model, seed)


def recompute_blocks(model: nn.Module) -> None:
    """Checkpoint each block. The forward is replaced, not the module, so that names stay."""
    for layer in model.layers:  # type: ignore[union-attr]
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def shard(model: nn.Module, fsdp_mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2 by block. Gradients are summed and never averaged: the loss is divided once, by all its tokens."""
    # Inputs are not cast: rotary cos and sin stay fp32 beside a bf16 residual stream.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=fsdp_mesh, mp_policy=policy)
    fully_shard(model, mesh=fsdp_mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no scaled sum, which a divide factor would otherwise ask for.
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Draw each parameter from a generator of its own, seeded by its name; each rank keeps its shard.

    So the weights depend on the seed and the device type alone, not on the number of ranks. Values are
    normal, cut at three standard deviations.
    """
    for name, parameter in model.named_parameters():
        std = model.init_std(name)  # type: ignore[operator]
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if std is None:
            values.fill_(1.0)
        else:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator(values.device).manual_seed(int.from_bytes(digest[:7], "big"))
            nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank has drawn the same values, so nothing is sent.
            parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None))
        else:
            parameter.copy_(values)
