"""Records of steps, the tags that TensorBoard gets of them, and a disk that is full."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_cp.metrics.step_record import StepRecord


def record(step: int, loss: float | None = 2.0) -> StepRecord:
    return StepRecord(
        step=step,
        stage="4K",
        stage_index=0,
        seq_len=4096,
        cp=2,
        tokens=step * 8192,
        loss=loss,
        grad_norm=loss,
        lr=1e-3,
        tokens_per_second=5000.0,
        tokens_per_second_per_rank=2500.0,
        mfu=0.4,
        peak_memory_bytes=10**9,
        data_wait_seconds=0.01,
        step_seconds=1.6,
        pipeline_idle=0.25,
        seconds={"forward": 0.5},
        largest_logit=9.0,
        block_grad_norm={"0": 1.0, "1": 2.0},
        block_output={"0": 3.0},
        loss_by_position={"0": 3.0, "16": 2.0},
        loss_by_document_position={"0": 3.0},
        loss_by_source={"books": 2.0},
        mfu_mask=0.3,
        cp_imbalance=1.1,
        cp_keys_sent=0.4,
        unlabelled=0.01,
        memory_bytes={"weights": 10**6},
        expert_load={"1": 2.5},
        router_entropy={"1": 0.6},
        idle_experts=0.25,
        skipped=loss is None,
    )


# Dashboards of users rely on these.
TAGS = {
    *("train/loss", "train/perplexity", "train/grad_norm", "train/lr"),
    *("health/skipped", "health/spikes", "health/skipped_steps", "health/rollbacks"),
    *("health/largest_logit", "grad_norm_by_block/0", "grad_norm_by_block/1", "largest_output_by_block/0"),
    *("speed/tokens_per_second", "speed/tokens_per_second_per_rank", "speed/mfu", "speed/mfu_mask"),
    *("speed/step_seconds", "speed/data_wait_seconds", "speed/pipeline_idle"),
    *("speed/cp_imbalance", "speed/cp_keys_sent"),
    *("loss_by_position/0", "loss_by_position/16", "loss_by_document_position/0", "loss_by_source/books"),
    *("seconds/forward", "data/unlabelled_share", "memory/weights", "memory/peak_bytes"),
    *("experts/largest_load/1", "experts/router_entropy/1", "experts/idle_share"),
    *("curriculum/stage", "curriculum/seq_len", "curriculum/cp", "curriculum/tokens_seen"),
}


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Writing more to a file fails with an OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
