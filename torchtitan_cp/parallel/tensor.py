"""Tensor parallelism with sequence parallelism between the blocks, from an architecture's plan, which is data.

Source: Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022), on DTensor's parallel styles.
"""

import fnmatch
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch import _inductor as inductor
from torch._functorch import config as functorch_config
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchtitan_cp.config import ConfigError

logger = logging.getLogger(__name__)

SEQUENCE = Shard(1)


class GatherSequence(ParallelStyle):
    """A module's first input `[B, s/tp, E]` arrives as `[B, s, E]`; its gradient leaves reduce-scattered."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (as_sequence(inputs[0], device_mesh).redistribute(placements=[Replicate()]), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


class VocabularyRows(RowwiseParallel):
    """An embedding of which each rank holds some rows; its output is cut along the sequence."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=SEQUENCE)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        # The output is still travelling. A compiled block that is given such a tensor returns a gradient of
        # zeros for it (torch 2.13), and a copy has arrived.
        module.register_forward_hook(lambda module, inputs, output: output.clone())
        return module


class PerHead(ParallelStyle):
    """A module that gives its weight `[Hq]`, a number for each head; a rank has those of its own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, _deal_out)
        module.register_forward_hook(lambda module, inputs, output: output.to_local())
        return module


def _deal_out(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))


# What an architecture's plan may call a module. A new role goes here.
ROLES: dict[str, Callable[[], ParallelStyle]] = {
    # A linear layer whose outputs are dealt out, and one whose inputs are; between them a rank works alone.
    "column": ColwiseParallel,
    "row": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    # The rows of the vocabulary are dealt out: of the embedding, and of the output layer.
    "embedding": VocabularyRows,
    "output": lambda: ColwiseParallel(input_layouts=SEQUENCE),
    # A norm on a rank's own part of the sequence, with the same weight everywhere.
    "sequence": SequenceParallel,
    "gather": GatherSequence,
    # A norm over each head of `[B, s, H/tp, D]`, with the same weight everywhere; and numbers that heads have one each.
    "heads": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "per_head": PerHead,
}


def check_tensor_parallel(shape: Any, tp: int) -> None:
    """Refuse sizes that tensor parallelism cannot deal out evenly.

    Args:
        shape: with `n_heads`, `n_kv_heads` and `ffn_dim`.

    Raises:
        ConfigError: naming the size and the degrees that divide it.
    """
    for name in ("n_kv_heads", "n_heads", "ffn_dim"):
        size = getattr(shape, name)
        if size % tp:
            fits = [str(degree) for degree in range(1, tp) if size % degree == 0]
            raise ConfigError(
                f"parallel.tp = {tp} does not divide the model's {name} = {size}",
                fix=f"use tp {' or '.join(fits)}, and context parallelism (parallel.cp) for the other ranks",
            )


def shard_tensors(model: nn.Module, roles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Give every module its role, in place. The model is on the meta device.

    Args:
        roles: pattern of module names -> name of a role.
        mesh: 1-D, the tensor-parallel ranks.
    """
    # Sharding makes new parameters, so tied ones are found before and tied again after.
    tied = [names for names in _names_by_parameter(model).values() if len(names) > 1]
    plan = {
        name: ROLES[role]()
        for pattern, role in roles.items()
        for name, _ in model.named_modules()
        if fnmatch.fnmatchcase(name, pattern)
    }
    parallelize_module(model, mesh, plan)
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, parameter)
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not left, f"the plan gives no role to {', '.join(left)}"


def overlap_products(mesh: DeviceMesh) -> bool:
    """Let the compiler cut gathers and reduce-scatters into parts that travel beside the products they feed.

    Source: async tensor parallelism of PyTorch, on symmetric memory. Inactive, with a warning, off CUDA.

    Args:
        mesh: the tensor-parallel ranks.
    """
    if mesh.device_type != "cuda":
        logger.warning("parallel.async_tp is inactive: symmetric memory is CUDA's, and this is %s", mesh.device_type)
        return False
    inductor.config._micro_pipeline_tp = True
    symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)
    return True


def share_no_compiled_code() -> None:
    """Have this process compile what works on DTensors for itself, in place of taking it from torch's cache on disk.

    That cache goes by the whole tensor (torch 2.13): a rank could be given code for another's device, or for a shard of
    another size or kind. Source: pytorch/pytorch issue 188390.
    """
    functorch_config.enable_autograd_cache = False


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def as_sequence(hidden: Tensor, mesh: DeviceMesh) -> DTensor:
    """A rank's part of the sequence `[B, s/tp, E]` as one of the whole."""
    return hidden if isinstance(hidden, DTensor) else DTensor.from_local(hidden, mesh, [SEQUENCE], run_check=False)


def vocabulary_part(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, ProcessGroup | None, int]:
    """What the loss on sharded logits needs.

    Args:
        hidden: `[B, s/tp, E]` under tensor parallelism, where `weight` is a DTensor; else whole, like `weight`.

    Returns:
        (hidden `[B, s, E]`, whose gradient is summed over the ranks on its way back; this rank's rows of the
        weight `[V/tp, E]`; the ranks with the others, None for no others; the first of this rank's rows).
    """
    if not isinstance(weight, DTensor):
        return hidden, weight, None, 0
    mesh = weight.device_mesh
    whole = as_sequence(hidden, mesh).redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    share = -(-weight.shape[0] // mesh.size())
    return whole, weight.to_local(), mesh.get_group(), min(share * mesh.get_local_rank(), weight.shape[0])


def part_of(values: Tensor, parameter: Tensor) -> Tensor:
    """The shard of a whole tensor that this rank holds of a DTensor: FSDP cuts what tensor parallelism left."""
    if not isinstance(parameter, DTensor):
        return values
    mesh = parameter.device_mesh
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(parameter.placements[axis], "dim", None)
        if dim is not None:
            values = _chunk(values, mesh.size(axis), mesh.get_local_rank(axis), dim)
    return values


def _chunk(values: Tensor, parts: int, index: int, dim: int) -> Tensor:
    """torch.chunk's part `index`, empty where it makes fewer parts."""
    chunks = values.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else values.narrow(dim, 0, 0)
