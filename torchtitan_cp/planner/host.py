"""Host memory of a node: what is offloaded there, batches that are read ahead, and a checkpoint's copy."""

import math

from torchtitan_cp.data.batches.loader import READ_AHEAD
from torchtitan_cp.parallel.nf4 import WEIGHT_BYTES
from torchtitan_cp.planner.memory import block_bytes, kept_bytes, state_bytes, weight_bytes
from torchtitan_cp.planner.stage import PlannedRank, PlannedStage
from torchtitan_cp.planner.strategy_costs import FP32_BYTES

TOKEN_BYTES = 16  # a token and its label, int64


def host_memory(planned: PlannedStage) -> dict[str, float]:
    """Bytes by kind that the ranks of a node hold in host memory, if each held as much as the one that holds most.

    Weights, gradients and optimizer state are on the host as `parallel.fsdp_cpu_offload` and `optimizer.offload_state`
    say, activations as `activation.offload` says. Not counted: what a process holds anyway (a few GiB), and the corpus,
    which is mapped from files.
    """
    by_rank = [_rank_bytes(planned, pp_rank) for pp_rank in planned.ranks]
    most = max(by_rank, key=lambda by_kind: sum(by_kind.values()))
    ranks = planned.cluster.accelerator.ranks_per_node
    return {kind: size * ranks for kind, size in most.items()}


def _rank_bytes(planned: PlannedStage, pp_rank: PlannedRank) -> dict[str, float]:
    """Bytes by kind of one rank."""
    config, args = planned.config, planned.args
    weights, gradients = weight_bytes(planned, pp_rank), pp_rank.trained / planned.degrees.fsdp * FP32_BYTES
    quantized = pp_rank.layers * planned.quantized_block * WEIGHT_BYTES / planned.degrees.fsdp
    moments = state_bytes(planned, pp_rank)
    # Most parameters are in matrices of the MLP. In bf16 they take half as much, rounded up likewise.
    matrix = args.dim * args.ffn_dim * max(1, args.n_experts) / planned.degrees.tp / planned.degrees.fsdp
    pinned, pinned_nf4 = (pinned_ratio(matrix * size) for size in (FP32_BYTES, WEIGHT_BYTES))
    everything = config.parallel.fsdp_cpu_offload
    state = 0.0
    if everything:
        state = moments  # it is not pinned
    elif config.optimizer.offload_state:
        state = moments * pinned
    loaded = READ_AHEAD + 1
    return {
        "weights": ((weights - quantized) * pinned + quantized * pinned_nf4) * everything,
        "gradients": gradients * pinned * everything,
        "optimizer": state,
        "activations": _activations(planned, pp_rank) if config.activation.offload else 0.0,
        # As read, and pinned. A checkpoint has what is trained, which has as many bytes as its gradients.
        "batches": 2 * loaded * planned.stage.micro_batches * planned.tokens * TOKEN_BYTES,
        "checkpoint": (gradients + moments) * (config.checkpoint.enable and config.checkpoint.asynchronous),
    }


def _activations(planned: PlannedStage, pp_rank: PlannedRank) -> float:
    """Bytes of pinned memory for what the layers of a rank keep for their backward."""
    block = block_bytes(planned)
    query = planned.tokens * planned.heads.query * planned.heads.dim * planned.element_bytes
    kept = zip(kept_bytes(planned, block), (block.stream, query, block.ffn / 4), strict=True)
    return pp_rank.kept_layers * sum(size * pinned_ratio(tensor_bytes) for size, tensor_bytes in kept)


def pinned_ratio(tensor_bytes: float) -> float:
    """Pinned memory for a tensor over its own bytes: torch rounds up to a power of two, to use it again."""
    return 2 ** math.ceil(math.log2(tensor_bytes)) / tensor_bytes
