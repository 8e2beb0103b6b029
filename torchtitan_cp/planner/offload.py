"""Seconds that memory on the host costs a step: copies over the link to it that no work hides, and updates there.

What is copied, in bytes of a rank:

- `activation.offload`: what a layer keeps, out in its forward and back in its backward.
- `parallel.fsdp_cpu_offload`: the shard of a layer's weights, as they are stored, whenever they are gathered, and the
  fp32 gradients of those that are trained, out. The first gradients of a step are copied beside the computation. For
  those of later micro-batches, which add up on the host, the launching thread waits, and their memory is not pinned
  (torch's `foreach_reduce`).
- `optimizer.offload_state`: the state, in and out on one stream, beside the update.

Copies in and out run side by side. Contention with messages on the same link is not counted.
"""

from torchtitan_cp.optim.optimizers import clip_bytes
from torchtitan_cp.planner.devices import HOST_UPDATE_BANDWIDTH, PAGEABLE
from torchtitan_cp.planner.memory import block_bytes, kept_bytes, optimizer_shares, state_bytes, stored_bytes
from torchtitan_cp.planner.stage import PlannedRank, PlannedStage
from torchtitan_cp.planner.strategy_costs import FP32_BYTES

OFFLOAD, HOST_UPDATE = "offload messages", "update on the host"  # kinds of seconds
SUM_PASSES = 3  # of a gradient that is added to another one


def exposed_copies(planned: PlannedStage, forward: float, backward: float) -> float:
    """Seconds of copies of a layer and micro-batch that its work does not hide.

    Args:
        forward, backward: seconds of the layer's work.
    """
    parallel, times = planned.config.parallel, planned.stage.micro_batches
    kept = sum(kept_bytes(planned, block_bytes(planned))) if planned.config.activation.offload else 0.0
    kept /= planned.cluster.accelerator.host_bandwidth
    trained, adapters = planned.trained_block, planned.trained.adapters if planned.trained else 0.0
    weights = stored_bytes(trained, planned.counts.block - (trained - adapters), planned.quantized_block)
    shard, gradients, waiting = _shard_seconds(planned, weights, trained)
    gathers, again, reduces = 1.0, 1.0 if parallel.fsdp_reshard != "never" else 0.0, 1.0
    if planned.degrees.pp > 1:  # weights stay gathered for a step, whose gradients are reduced once
        gathers, again, reduces = 1.0 if parallel.fsdp_reshard == "always" else 1 / times, 0.0, 1 / times
    in_forward = max(kept, gathers * shard)
    in_backward = max(kept + again * shard, reduces * gradients)
    return max(0.0, in_forward - forward) + max(0.0, in_backward - backward) + waiting


def exposed_outer_copies(planned: PlannedStage, pp_rank: PlannedRank) -> float:
    """Seconds of a step for the copies of the outer parameters, which nothing hides."""
    trained = planned.trained_outer(pp_rank)
    weights = stored_bytes(trained, pp_rank.outer_parameters - trained)
    times = 1 if planned.degrees.pp > 1 else planned.stage.micro_batches
    return times * sum(_shard_seconds(planned, weights, trained))


def _shard_seconds(planned: PlannedStage, weights: float, trained: float) -> tuple[float, float, float]:
    """Seconds to copy a rank's shard of weights, to copy its gradients, and to wait for these (the mean over a step).

    All are 0 unless weights are on the host.

    Args:
        weights: bytes, before FSDP shards them; trained: how many numbers have a gradient.
    """
    if not planned.config.parallel.fsdp_cpu_offload:
        return 0.0, 0.0, 0.0
    rate, size = planned.cluster.accelerator.host_bandwidth, trained / planned.degrees.fsdp * FP32_BYTES
    reduces = 1 if planned.degrees.pp > 1 else planned.stage.micro_batches
    waiting = (1 - 1 / reduces) * (size / rate / PAGEABLE + SUM_PASSES * size / HOST_UPDATE_BANDWIDTH)
    return weights / planned.degrees.fsdp / rate, size / rate, waiting


def update_seconds(planned: PlannedStage, pp_rank: PlannedRank) -> dict[str, float]:
    """Seconds of the optimizer in a step, and what they take longer where its state is on the host.

    They include the norm of the gradients, and their clipping as if every step were clipped. The products and messages
    of Muon are not counted.
    """
    config, settings = planned.config, planned.config.optimizer
    by_gradient = FP32_BYTES + (clip_bytes(settings) if config.training.max_grad_norm else 0.0)
    updating = sum(count * kind.update_bytes(settings) for kind, count in optimizer_shares(planned, pp_rank))
    moved = updating + pp_rank.trained / planned.degrees.fsdp * by_gradient
    on_device = planned.cluster.memory_seconds(moved)
    seconds = {"optimizer": on_device}
    if config.parallel.fsdp_cpu_offload:
        seconds[HOST_UPDATE] = max(0.0, moved / HOST_UPDATE_BANDWIDTH - on_device)
    elif settings.offload_state:
        copied = 2 * state_bytes(planned, pp_rank) / planned.cluster.accelerator.host_bandwidth
        seconds[OFFLOAD] = max(0.0, copied - planned.cluster.memory_seconds(updating))
    return seconds
