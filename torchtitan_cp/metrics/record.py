"""One optimizer step in numbers."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """A line of metrics.jsonl. Numbers are over all ranks unless they say otherwise.

    Attributes:
        step: optimizer steps taken with this one, from 1.
        stage: name of the curriculum's stage; stage_index: its place from 0.
        tokens: tokens seen by the whole run.
        loss: mean over the step's tokens, in nats; grad_norm: global, before clipping. None if not finite.
        mfu: model FLOPs utilisation, causal attention counted as causal; a fraction of the devices' peak.
        peak_memory_bytes: most that any one rank has used so far.
        data_wait_seconds: this step waited so long for its batch, on rank 0.
        pipeline_idle: share of the step that rank 0 spent in the pipeline without computing; None without one.
        skipped: the step was bad, and no weight was changed; skipped_steps, rollbacks, lr_cuts: of the run so far.
        spikes: numbers of the step far above what they were lately.
    """

    step: int
    stage: str
    stage_index: int
    seq_len: int
    cp: int
    tokens: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens_per_second: float
    tokens_per_second_per_rank: float
    mfu: float
    peak_memory_bytes: int
    data_wait_seconds: float
    step_seconds: float
    pipeline_idle: float | None = None
    skipped: bool = False
    spikes: int = 0
    skipped_steps: int = 0
    rollbacks: int = 0
    lr_cuts: int = 0

    @property
    def stage_number(self) -> int:
        """The stage's place from 1, as the console counts."""
        return self.stage_index + 1

    @property
    def perplexity(self) -> float | None:
        """exp(loss); None where that overflows."""
        return math.exp(self.loss) if self.loss is not None and self.loss < 700 else None
