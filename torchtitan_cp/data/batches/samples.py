"""A stage's sequences of S tokens by number: from which source each comes, and how much of it attends to itself."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from torchtitan_cp.config.data import ResolvedStageData
from torchtitan_cp.data.batches.mixture import Mixture
from torchtitan_cp.data.batches.packed_stream import PackedSequence, PackedStream
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.errors import DataError

GOLDEN = 0.6180339887498949  # its multiples spread evenly over [0, 1): they choose the short sequences


@dataclass(eq=False)
class StageSamples:
    """The sequences of a stage. Each depends only on the arguments and its number.

    Args:
        streams: text of each source, by name.
        seq_len: S.
        data: the stage's; its mixture is not empty.
        seed: the order of sources follows from it and from the stage.
        stage: index in the curriculum, from 0.
        step_sequences: sequences of one optimizer step.
        first_tokens: tokens of each source's stream that earlier stages took.
        steps: optimizer steps that the stage has at most.
        skipped_steps: steps of text that recovery skipped; the stage reads as many more. Where sources have ended, it
            reads the stage's first text again.

    Raises:
        DataError: the sources end before the stage does.
    """

    streams: Mapping[str, TokenStream]
    seq_len: int
    data: ResolvedStageData
    seed: int
    stage: int
    step_sequences: int
    first_tokens: Mapping[str, int]
    steps: int
    skipped_steps: int = 0

    def __post_init__(self) -> None:
        first = {name: self.first_tokens.get(name, 0) for name in self.streams}
        samples = self.steps * self.step_sequences
        most = samples + self.skipped_steps * self.step_sequences
        limits = {
            name: self._pack(name, first[name]).samples_within(epochs, most)
            for name, epochs in self.data.max_epochs.items()
            if self.data.mixture.get(name)
        }
        self.mixture = Mixture(self.data.mixture, self.seed, self.stage, limits)
        if samples > self.mixture.samples:
            raise DataError(
                f"data.max_epochs allows stage {self.stage + 1} only {self.mixture.samples:,} sequences of "
                f"{self.seq_len:,} tokens, but the stage has {samples:,}",
                fix="raise it, remove it for one of the sources, or make the stage shorter",
            )
        planned = self._counts(self.steps)
        self.packed = {
            name: self._pack(name, first[name], planned[name], count - planned[name])
            for name, count in self._counts(self.steps + self.skipped_steps).items()
        }

    def _pack(self, name: str, first: int, *counts: int) -> PackedStream:
        """The sequences of a source from its cursor `first` on; counts: samples and replacements."""
        return PackedStream(self.streams[name], self.seq_len, self.data, name, first, *counts)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return StageSamples, tuple(getattr(self, argument.name) for argument in fields(self))

    def sequence(self, number: int) -> PackedSequence:
        """Sequence `number` of the stage."""
        source, index = self.mixture.sample(number % self.mixture.samples)
        return replace(self.packed[source].sequence(index), document_lengths=self.document_lengths(number))

    def document_lengths(self, number: int) -> tuple[int, ...]:
        """Of sequence `number`, without reading a token: also cut at every multiple of its visible length."""
        source, index = self.mixture.sample(number % self.mixture.samples)
        lengths, visible = self.packed[source].document_lengths(index), self._visible_tokens(number)
        if visible >= self.seq_len:
            return lengths
        edges = sorted({*itertools.accumulate(lengths, initial=0), *range(0, self.seq_len, visible)})
        return tuple(stop - start for start, stop in itertools.pairwise(edges))

    def tokens_after(self, steps: int) -> dict[str, int]:
        """Tokens of each source's stream that this and earlier stages took, after so many steps of the stage."""
        counts = self._counts(steps)
        return {**self.first_tokens, **{name: self.packed[name].cursor_after(count) for name, count in counts.items()}}

    def epochs_after(self, steps: int) -> dict[str, float]:
        """How often each of the stage's sources was read after so many steps of the stage."""
        after = self.tokens_after(steps)
        return {name: after[name] / self.streams[name].store.tokens for name in self.packed}

    def last_steps(self) -> dict[str, int]:
        """The step of the stage, from 1, that takes the last of a source within its max_epochs; 0: none is left."""
        return {name: -(-samples // self.step_sequences) for name, samples in self.mixture.ends.items()}

    def _counts(self, steps: int) -> dict[str, int]:
        """Sequences of each source in so many steps of the stage."""
        return self.mixture.counts(min(steps * self.step_sequences, self.mixture.samples))

    def _visible_tokens(self, number: int) -> int:
        """Tokens that attend to each other in this sequence. Source of the growth: SkyLadder (Zhu et al., 2025)."""
        data, visible = self.data, self.seq_len
        step = number // self.step_sequences
        if data.growth_from and step < data.growth_steps:
            visible = data.growth_from + (self.seq_len - data.growth_from) * step // data.growth_steps
        if (number * GOLDEN) % 1 < data.short_share:
            visible = min(visible, data.short_seq_len)
        return visible


def held_out_samples(
    streams: Mapping[str, TokenStream], seq_len: int, data: ResolvedStageData, count: int, block: int = 0
) -> StageSamples | None:
    """Held-out sequences of a stage's sources, in the order of the stores; None if these sources hold nothing out.

    If a source has masks, they are packed as in training, so that few conversations lose their beginning.

    Args:
        data: the stage's; its mixture is not empty.
        count: how many sequences.
        block: tokens that attend to each other, counted from each sequence's start; 0: all.
    """
    mixture = {name: data.mixture[name] for name in streams if data.mixture.get(name)}
    if not mixture:
        return None
    packing = data.packing if any(streams[name].store.has_masks for name in mixture) else "concat"
    held_out = replace(data, mixture=mixture, packing=packing, packing_window=count, max_epochs={}, growth_from=0)
    held_out = replace(held_out, short_share=float(block > 0), short_seq_len=block)
    return StageSamples(streams, seq_len, held_out, 0, 0, count, {}, steps=1)
