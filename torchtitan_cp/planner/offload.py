"""Seconds that memory on the host costs a step: copies over the link to it that no work hides, and updates there.

What is copied, in bytes of a rank:

- `activation.offload`: what a layer keeps, out in its forward and back in its backward.
- `parallel.fsdp_cpu_offload`: the fp32 shard of a layer's weights whenever they are gathered, and its gradients, out.
  The first gradients of a step are copied beside the computation. For those of later micro-batches, which add up on the
  host, the launching thread waits, and their memory is not pinned (torch's `foreach_reduce`).
- `optimizer.offload_state`: the state, in and out on one stream, beside the update.

Copies in and out run side by side. Contention with messages on the same link is not counted.
"""

from torchtitan_cp.planner.devices import HOST_UPDATE_BANDWIDTH, PAGEABLE
from torchtitan_cp.planner.memory import block_bytes, kept_bytes, state_bytes
from torchtitan_cp.planner.stage import PlannedRank, PlannedStage
from torchtitan_cp.planner.strategy_costs import FP32_BYTES

OFFLOAD, HOST_UPDATE = "offload messages", "update on the host"  # kinds of seconds
UPDATE_PASSES = 7  # over fp32 numbers: weight and two moments are read and written, the gradient is read
SUM_PASSES = 3  # of a gradient that is added to another one


def exposed_copies(planned: PlannedStage, forward: float, backward: float) -> float:
    """Seconds of copies of a layer and micro-batch that its work does not hide.

    Args:
        forward, backward: seconds of the layer's work.
    """
    parallel, times = planned.config.parallel, planned.stage.micro_batches
    kept = sum(kept_bytes(planned, block_bytes(planned))) if planned.config.activation.offload else 0.0
    kept /= planned.cluster.accelerator.host_bandwidth
    shard, waiting = _shard_seconds(planned, planned.counts.block)
    gathers, again, reduces = 1.0, 1.0 if parallel.fsdp_reshard != "never" else 0.0, 1.0
    if planned.degrees.pp > 1:  # weights stay gathered for a step, whose gradients are reduced once
        gathers, again, reduces = 1.0 if parallel.fsdp_reshard == "always" else 1 / times, 0.0, 1 / times
    in_forward = max(kept, gathers * shard)
    in_backward = max(kept + again * shard, reduces * shard)
    return max(0.0, in_forward - forward) + max(0.0, in_backward - backward) + waiting


def exposed_outer_copies(planned: PlannedStage, pp_rank: PlannedRank) -> float:
    """Seconds of a step for the copies of the outer parameters, which nothing hides."""
    shard, waiting = _shard_seconds(planned, pp_rank.outer_parameters)
    times = 1 if planned.degrees.pp > 1 else planned.stage.micro_batches
    return times * (2 * shard + waiting)


def _shard_seconds(planned: PlannedStage, parameters: float) -> tuple[float, float]:
    """Seconds to copy a rank's shard of so many parameters, and to wait for its gradient (the mean over a step).

    Both are 0 unless weights are on the host.
    """
    if not planned.config.parallel.fsdp_cpu_offload:
        return 0.0, 0.0
    size = parameters / planned.degrees.fsdp * FP32_BYTES
    copied = size / planned.cluster.accelerator.host_bandwidth
    reduces = 1 if planned.degrees.pp > 1 else planned.stage.micro_batches
    later = 1 - 1 / reduces
    return copied, later * (copied / PAGEABLE + SUM_PASSES * size / HOST_UPDATE_BANDWIDTH)


def update_seconds(planned: PlannedStage, pp_rank: PlannedRank) -> dict[str, float]:
    """Seconds of the optimizer in a step, and what they take longer where its state is on the host."""
    moved = pp_rank.trained / planned.degrees.fsdp * FP32_BYTES * UPDATE_PASSES
    on_device = planned.cluster.memory_seconds(moved)
    seconds = {"optimizer": on_device}
    if planned.config.parallel.fsdp_cpu_offload:
        seconds[HOST_UPDATE] = max(0.0, moved / HOST_UPDATE_BANDWIDTH - on_device)
    elif planned.config.optimizer.offload_state:
        copied = 2 * state_bytes(planned, pp_rank) / planned.cluster.accelerator.host_bandwidth
        seconds[OFFLOAD] = max(0.0, copied - on_device)
    return seconds
