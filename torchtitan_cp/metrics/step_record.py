"""One optimizer step in numbers: the fields of metrics.jsonl and their tags in TensorBoard."""

import math
from dataclasses import dataclass, field
from typing import Annotated, get_origin, get_type_hints

Numbers = dict[str, float]


@dataclass(frozen=True)
class StepRecord:
    """A line of metrics.jsonl. Numbers cover all ranks unless they say otherwise.

    An annotation is a field's tag in TensorBoard; where a field has several numbers, each adds its name after a slash.

    Attributes:
        step: number of the optimizer step, from 1; skipped steps count.
        stage: name of the curriculum's stage; stage_index: its index from 0.
        tokens: tokens the whole run has trained on.
        loss: in nats, as training.loss_normalization says; grad_norm: global, before clipping. Both are None if the
            step was skipped.
        mfu: model FLOPs utilization with causal attention, as a fraction of the devices' peak.
        peak_memory_bytes: the most that any rank has used so far.
        data_wait_seconds: time rank 0 waited for the batch.
        seconds: parts of the step on rank 0: `forward`, `backward`, `optimizer`; `cp_wait`, how long these waited for
            context-parallel messages; `checkpoint`, how long a save before the step blocked the run.
        pipeline_idle: fraction of the step that rank 0 spent in the pipeline without computing; None without one.
        skipped: the step was bad and changed no weight; skipped_steps, rollbacks: totals of the run.
        spikes: how many of the step's numbers were far above their recent values.
        largest_logit: over all tokens; None if not finite.
        block_grad_norm: gradient norm of each block; block_output: its largest absolute output.
        loss_by_position: mean loss of each bin of positions in the sequence, by the bin's first position;
            loss_by_document_position: the same by position in the document; loss_by_source: by source. These fields and
            the following ones are recorded every metrics.interval steps.
        mfu_mask: as mfu, counting only the attention that documents and windows of rank 0's sequences allow.
        cp_imbalance: query-key pairs of the busiest context-parallel rank over the mean, in rank 0's worst micro-batch.
        cp_keys_sent: rows of keys that a context-parallel rank has to send, over the rows it has; also the worst.
        unlabelled: fraction of the step's tokens that have no label.
        learned_tokens: how many tokens of the step have a label.
        memory_bytes: on rank 0: `weights`, `gradients`, `optimizer`, and `other`, the rest of its peak.
        expert_load: tokens of each layer's busiest expert over the even share; router_entropy: mean entropy of the
            router's shares for a token in each layer, in nats.
        idle_experts: fraction of all experts that no token reached.
    """

    step: int
    stage: str
    stage_index: int
    seq_len: Annotated[int, "curriculum/seq_len"]
    cp: Annotated[int, "curriculum/cp"]
    tokens: Annotated[int, "curriculum/tokens_seen"]
    loss: Annotated[float | None, "train/loss"]
    grad_norm: Annotated[float | None, "train/grad_norm"]
    lr: Annotated[float, "train/lr"]
    tokens_per_second: Annotated[float, "speed/tokens_per_second"]
    tokens_per_second_per_rank: Annotated[float, "speed/tokens_per_second_per_rank"]
    mfu: Annotated[float, "speed/mfu"]
    peak_memory_bytes: Annotated[int, "memory/peak_bytes"]
    data_wait_seconds: Annotated[float, "speed/data_wait_seconds"]
    step_seconds: Annotated[float, "speed/step_seconds"]
    seconds: Annotated[Numbers, "seconds"] = field(default_factory=dict)
    pipeline_idle: Annotated[float | None, "speed/pipeline_idle"] = None
    skipped: Annotated[bool, "health/skipped"] = False
    spikes: Annotated[int, "health/spikes"] = 0
    skipped_steps: Annotated[int, "health/skipped_steps"] = 0
    rollbacks: Annotated[int, "health/rollbacks"] = 0
    largest_logit: Annotated[float | None, "health/largest_logit"] = None
    block_grad_norm: Annotated[Numbers, "grad_norm_by_block"] = field(default_factory=dict)
    block_output: Annotated[Numbers, "largest_output_by_block"] = field(default_factory=dict)
    loss_by_position: Annotated[Numbers, "loss_by_position"] = field(default_factory=dict)
    loss_by_document_position: Annotated[Numbers, "loss_by_document_position"] = field(default_factory=dict)
    loss_by_source: Annotated[Numbers, "loss_by_source"] = field(default_factory=dict)
    mfu_mask: Annotated[float | None, "speed/mfu_mask"] = None
    cp_imbalance: Annotated[float | None, "speed/cp_imbalance"] = None
    cp_keys_sent: Annotated[float | None, "speed/cp_keys_sent"] = None
    unlabelled: Annotated[float | None, "data/unlabelled_share"] = None
    learned_tokens: Annotated[int | None, "data/learned_tokens"] = None
    memory_bytes: Annotated[dict[str, int], "memory"] = field(default_factory=dict)
    expert_load: Annotated[Numbers, "experts/largest_load"] = field(default_factory=dict)
    router_entropy: Annotated[Numbers, "experts/router_entropy"] = field(default_factory=dict)
    idle_experts: Annotated[float | None, "experts/idle_share"] = None

    def scalars(self) -> Numbers:
        """The step's numbers by tag, without those that are None."""
        numbers: Numbers = {"curriculum/stage": self.stage_index + 1}
        if self.loss is not None and self.loss < 700:  # beyond that, exp overflows
            numbers["train/perplexity"] = math.exp(self.loss)
        for name, tag in TAGS.items():
            value = getattr(self, name)
            if isinstance(value, dict):
                numbers |= {f"{tag}/{part}": number for part, number in value.items()}
            elif value is not None:
                numbers[tag] = value
        return numbers


HINTS = get_type_hints(StepRecord, include_extras=True)
TAGS = {name: hint.__metadata__[0] for name, hint in HINTS.items() if get_origin(hint) is Annotated}
