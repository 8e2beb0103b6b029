"""One optimizer step in numbers."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """A line of metrics.jsonl. Numbers are over all ranks unless they say otherwise.

    Attributes:
        step: optimizer steps begun with this one, from 1.
        stage: name of the curriculum's stage; stage_index: its place from 0.
        tokens: tokens trained on by the whole run.
        loss: mean over the step's tokens, in nats; grad_norm: global, before clipping. None of a step left out.
        mfu: model FLOPs utilisation, causal attention counted as causal; a fraction of the devices' peak.
        peak_memory_bytes: most that any one rank has used so far.
        data_wait_seconds: this step waited so long for its batch, on rank 0.
        seconds: what the step went into on rank 0: `forward`, `backward`, `optimizer`; in them `cp_wait`, for which
            messages of context parallelism were waited for; `checkpoint`, for which the step before stood still.
        pipeline_idle: share of the step that rank 0 spent in the pipeline without computing; None without one.
        skipped: the step was bad, and no weight was changed; skipped_steps, rollbacks, lr_cuts: of the run so far.
        spikes: numbers of the step far above what they were lately.
        largest_logit: over all tokens; None if not finite.
        block_grad_norm: of each block's parameters; block_output: its largest absolute output. Both by block.
        loss_by_position: mean loss by the first position of each bin of the sequence; loss_by_document_position: of
            the document; loss_by_source. These and the following are of every metrics.interval-th step.
        mfu_mask: as mfu, with only the attention that the documents and windows of rank 0's sequences allow.
        cp_imbalance: pairs of the busiest context-parallel rank over the mean, in the worst of rank 0's micro-batches.
        unlabelled: share of the step's tokens that predict nothing.
        memory_bytes: on rank 0, of `weights`, `gradients`, `optimizer`, and `other`, what its peak holds besides.
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
    seconds: dict[str, float] = field(default_factory=dict)
    pipeline_idle: float | None = None
    skipped: bool = False
    spikes: int = 0
    skipped_steps: int = 0
    rollbacks: int = 0
    lr_cuts: int = 0
    largest_logit: float | None = None
    block_grad_norm: dict[str, float] = field(default_factory=dict)
    block_output: dict[str, float] = field(default_factory=dict)
    loss_by_position: dict[str, float] = field(default_factory=dict)
    loss_by_document_position: dict[str, float] = field(default_factory=dict)
    loss_by_source: dict[str, float] = field(default_factory=dict)
    mfu_mask: float | None = None
    cp_imbalance: float | None = None
    unlabelled: float | None = None
    memory_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def stage_number(self) -> int:
        """The stage's place from 1, as the console counts."""
        return self.stage_index + 1

    @property
    def perplexity(self) -> float | None:
        """exp(loss); None where that overflows."""
        return math.exp(self.loss) if self.loss is not None and self.loss < 700 else None
