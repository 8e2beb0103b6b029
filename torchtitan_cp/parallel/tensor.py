"""Tensor parallelism with sequence parallelism between the blocks, by the roles an architecture gives its modules.

Source: Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022), on DTensor's parallel styles.
"""

import fnmatch
import logging
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch import _inductor as inductor
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchtitan_cp.attention.local_shard import shard_slices
from torchtitan_cp.config.contract import LanguageModel

logger = logging.getLogger(__name__)

SEQUENCE = Shard(1)


class GatherSequence(ParallelStyle):
    """Gathers a module's first input, `[B, s/tp, E] -> [B, s, E]`, and reduce-scatters its gradient."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (as_sequence(inputs[0], device_mesh).redistribute(placements=[Replicate()]), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


class VocabularyRows(RowwiseParallel):
    """An embedding whose rows are sharded."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        # The output is still being received. A compiled block returns a gradient of zeros for such an input (torch
        # 2.13); a clone waits for it.
        module.register_forward_hook(lambda module, inputs, output: output.clone())
        return module


class PerHead(ParallelStyle):
    """A module that returns its weight `[Hq]`, a number for each head; a rank holds the numbers of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, device_mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        module.register_forward_hook(lambda module, inputs, output: output.to_local())
        return module


# The roles that an architecture may give its modules.
ROLES: dict[str, Callable[[], ParallelStyle]] = {
    # A linear layer with sharded outputs, and one with sharded inputs; nothing is sent between them.
    "column": ColwiseParallel,
    "row": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    # The embedding and the output layer, sharded by rows of the vocabulary.
    "embedding": lambda: VocabularyRows(input_layouts=Replicate(), output_layouts=SEQUENCE),
    "output": lambda: ColwiseParallel(input_layouts=SEQUENCE),
    # A norm on this rank's part of the sequence, its weight replicated; one whose output is a plain tensor; and a
    # linear layer on `[tokens, E]`, as torch 2.11 cannot flatten a sharded sequence.
    "sequence": SequenceParallel,
    "local_sequence": lambda: SequenceParallel(use_local_output=True),
    "local_tokens": lambda: SequenceParallel(sequence_dim=0, use_local_output=True),
    "gather": GatherSequence,
    # A norm over each head of `[B, s, H/tp, D]`, its weight replicated; and a weight with one number for each head.
    "heads": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "per_head": PerHead,
}


def apply_tensor_parallel(model: LanguageModel, roles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Shard every module but `experts` by its role, in place. The model is on the meta device.

    Args:
        roles: pattern of module names -> name of a role.
        mesh: 1-D, the tensor-parallel ranks.
    """
    # Sharding makes new parameters, so a tied output must be tied again.
    has_both = hasattr(model, "tok_embeddings") and hasattr(model, "output")
    tied = has_both and model.output.weight is next(model.tok_embeddings.parameters())
    plan = {
        name: ROLES[role]()
        for pattern, role in roles.items()
        for name, _ in model.named_modules()
        if fnmatch.fnmatchcase(name, pattern)
    }
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parallelize_module(model, mesh, plan)
    for name in frozen:  # torch's SequenceParallel makes parameters that require gradients
        model.get_parameter(name).requires_grad_(False)
    if tied:
        model.output.weight = next(model.tok_embeddings.parameters())
    experts = {parameter for module in getattr(model, "experts", {}).values() for parameter in module.parameters()}
    unsharded = [name for name, p in model.named_parameters() if not isinstance(p, DTensor) and p not in experts]
    assert not unsharded, f"no role shards {', '.join(unsharded)}"


def enable_async_tp(mesh: DeviceMesh) -> None:
    """Let the compiler split gathers and reduce-scatters, and overlap them with the matrix products beside them.

    Source: PyTorch's async tensor parallelism, on symmetric memory. Without CUDA it is inactive, with a warning.

    Args:
        mesh: the tensor-parallel ranks.
    """
    if mesh.device_type != "cuda":
        logger.warning("parallel.async_tp is inactive: symmetric memory is CUDA's, and this is %s", mesh.device_type)
        return
    inductor.config._micro_pipeline_tp = True
    symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)


def as_sequence(hidden: Tensor, mesh: DeviceMesh) -> DTensor:
    """A rank's part of the sequence `[B, s/tp, E]` as a DTensor."""
    return hidden if isinstance(hidden, DTensor) else DTensor.from_local(hidden, mesh, [SEQUENCE], run_check=False)


def vocabulary_shard(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, ProcessGroup | None, int]:
    """The inputs of a loss whose logits are sharded by vocabulary.

    Args:
        hidden: `[B, s/tp, E]` under tensor parallelism, where `weight` is a DTensor; otherwise `[B, s, E]`.

    Returns:
        (hidden `[B, s, E]`, whose gradient is summed over the ranks in backward; this rank's rows of the weight
        `[V/tp, E]`; the group of ranks that together hold all rows, None without tensor parallelism; the number of
        this rank's first row).
    """
    if not isinstance(weight, DTensor):
        return hidden, weight, None, 0
    mesh = weight.device_mesh
    whole = as_sequence(hidden, mesh).redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return whole, weight.to_local(), mesh.get_group(), shard_slices(weight)[0].start
