"""From a stage's sequences to the micro-batches of one rank.

Ranks are integers here. The number of a step decides its sequences, their work and the data-parallel rank decide which
of them a rank reads, and the plan for their documents decides which tokens of these it holds.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan_cp.attention import AttentionMask, Plan, prepare_plan
from torchtitan_cp.data.batches.balance import attention_work, balanced_order
from torchtitan_cp.data.batches.packed_stream import PackedSequence


class Samples(Protocol):
    """Where sequences come from: StageSamples."""

    def sequence(self, number: int) -> PackedSequence: ...

    def document_lengths(self, number: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class BatchLayout:
    """How one optimizer step is divided into micro-batches and ranks, and which share is this rank's.

    Attributes:
        seq_len: S.
        micro_batches: forwards of one step on one rank.
        micro_batch_sequences: B, sequences of one forward on one rank.
        dp: data-parallel ranks.
        dp_rank: index of this rank among them.
        make_plan: (S, mask=, like=, strategy=) -> this rank's plan; can be pickled.
        strategies: exchange of the layers by their window, in keys; 0, which is always there: no window.
        weighted: micro-batches contain the weights of their tokens.
    """

    seq_len: int
    micro_batches: int
    micro_batch_sequences: int
    dp: int
    dp_rank: int
    make_plan: Callable[..., Plan]
    strategies: Mapping[int, str] = field(default_factory=lambda: {0: "auto"})
    weighted: bool = False

    @property
    def sequences(self) -> int:
        """Sequences of a step over all ranks."""
        return self.micro_batches * self.micro_batch_sequences * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.seq_len * self.sequences

    def plans(self, mask: AttentionMask | None = None) -> dict[int, Plan]:
        """The plan for each window, and without one (0), all on one layout."""
        mask = mask or AttentionMask()
        plan = self.make_plan(self.seq_len, mask=mask, strategy=self.strategies[0])
        # A window as long as the sequence hides nothing, and kernels without windows are faster.
        plans = dict.fromkeys(self.strategies, plan)
        for window, strategy in self.strategies.items():
            if 0 < window < self.seq_len:
                windowed = mask.windowed(window)
                plans[window] = self.make_plan(self.seq_len, mask=windowed, like=plan, strategy=strategy)
        return plans


@dataclass(frozen=True)
class MicroBatch:
    """One forward of one rank.

    Attributes:
        tokens: `[B, S/cp]` int64.
        labels: `[B, S/cp]` int64, the next token of each; IGNORED where there is none.
        positions: `[S/cp]` int64, or `[B, S/cp]` where rows differ.
        plans: attention plans by the layers' window; 0: no window.
        numbers: of its sequences in the stage.
        sources: name of each sequence's source.
        document_positions: `[B, S/cp]` int64, how many tokens of its own document precede each.
        weights: `[B, S/cp]` fp32, of each token among those of its document; see PackedSequence.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    plans: dict[int, Plan]
    numbers: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    document_positions: Tensor | None = None
    weights: Tensor | None = None

    @property
    def plan(self) -> Plan:
        """The plan of layers without a window."""
        return self.plans[0]

    def pin_memory(self) -> "MicroBatch":
        """A copy with its tensors in pinned memory.

        torch's loader calls this method, in a thread of the training process, which is where plans are prepared.
        """
        for plan in self.plans.values():
            prepare_plan(plan)
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            positions=self.positions.pin_memory(),
            document_positions=None if self.document_positions is None else self.document_positions.pin_memory(),
            weights=None if self.weights is None else self.weights.pin_memory(),
        )


def batch_signature(batch_layout: BatchLayout, micro_batches: Sequence[MicroBatch]) -> dict[str, object]:
    """What ranks must agree on before they exchange the messages of a step, by name.

    Data-parallel ranks have different documents, so the names of these contain the rank.
    """
    plan, of = micro_batches[0].plan, f"of the first batch of data-parallel rank {batch_layout.dp_rank}"
    facts = {name: value for name, value in vars(batch_layout).items() if name not in ("dp_rank", "make_plan")}
    facts |= {name: getattr(plan, name) for name in ("strategy", "kernel", "all_to_all_ranks", "kv_transfer", "ranks")}
    plans = [plan for batch in micro_batches for _, plan in sorted(batch.plans.items())]
    for name, values in (
        ("sequences", [batch.numbers for batch in micro_batches]),
        ("documents", [plan.mask for plan in plans]),
        ("layout", [plan.layout for plan in plans]),
    ):
        facts[f"the {name} {of}"] = f"sha256:{hashlib.sha256(repr(values).encode()).hexdigest()}"
    return facts


def assign_sequences(samples: Samples, step: int, batch_layout: BatchLayout) -> np.ndarray:
    """`[micro_batches, dp, B]` int64: numbers of a step's sequences, assigned by their work."""
    numbers = range(step * batch_layout.sequences, (step + 1) * batch_layout.sequences)
    work = [attention_work(samples.document_lengths(number)) for number in numbers]
    return numbers.start + balanced_order(work, batch_layout.dp, batch_layout.micro_batches)


def read_step(samples: Samples, batch_layout: BatchLayout, step: int) -> tuple[MicroBatch, ...]:
    """This rank's micro-batches of a step in the stage."""
    assigned = assign_sequences(samples, step, batch_layout)[:, batch_layout.dp_rank].tolist()
    return tuple(collate(samples.sequence, batch_layout, numbers) for numbers in assigned)


def collate(read: Callable[[int], PackedSequence], batch_layout: BatchLayout, numbers: list[int]) -> MicroBatch:
    """The micro-batch of these sequences, with the plans for their documents."""
    rows = [read(number) for number in numbers]
    lengths = tuple(row.document_lengths for row in rows)
    whole = all(row == (batch_layout.seq_len,) for row in lengths)
    plans = batch_layout.plans(None if whole else AttentionMask(document_lengths=lengths))
    tokens, labels, positions, within, *weights = (
        plans[0].shard(torch.from_numpy(np.stack([getattr(row, name) for row in rows])), dim=1)
        for name in ("tokens", "labels", "positions", "document_positions", *["weights"] * batch_layout.weighted)
    )
    positions = positions[0] if (positions == positions[0]).all() else positions
    sources = tuple(row.spans[0].source for row in rows)
    return MicroBatch(tokens, labels, positions, plans, tuple(numbers), sources, within, *weights)
