"""A stage's sequences by number, from all its sources: which text the run trains on, and in which order."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torchtitan_cp.config.sections import ResolvedStageData
from torchtitan_cp.data.batches.mixture import Mixture, samples_within
from torchtitan_cp.data.batches.packing import PackedSequence, PackedStream
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.errors import DataError

GOLDEN = 0.6180339887498949  # its multiples spread evenly over [0, 1): they choose the short sequences


@dataclass(eq=False)
class StageSamples:
    """The sequences of a stage. Each depends only on the arguments and its number.

    Args:
        streams: of each source, by name.
        seq_len: S.
        data: the stage's; its mixture is not empty.
        seed: of the run.
        stage: number of the stage.
        step_sequences: sequences of one optimizer step.
        first_tokens: for each source, how much of its stream earlier stages took.
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
        limits = {
            name: samples_within(epochs, self.streams[name].store.tokens, self.seq_len, first[name])
            for name, epochs in self.data.max_epochs.items()
            if self.data.mixture.get(name)
        }
        self.mixture = Mixture(self.data.mixture, self.seed, self.stage, limits)
        samples = self.steps * self.step_sequences
        if samples > self.mixture.samples:
            raise DataError(
                f"data.max_epochs leaves stage {self.stage + 1} {self.mixture.samples:,} sequences of "
                f"{self.seq_len:,} tokens, but the stage has {samples:,}",
                fix="raise it, leave a source without one, or make the stage shorter",
            )
        self.packed = {
            name: PackedStream(self.streams[name], self.seq_len, self.data, name, first[name], count)
            for name, count in self._counts(self.steps + self.skipped_steps).items()
        }

    def __reduce__(self) -> Any:
        return StageSamples, tuple(getattr(self, argument.name) for argument in fields(self))

    def sequence(self, number: int) -> PackedSequence:
        """Sequence `number` of the stage."""
        source, index = self.mixture.sample(number % self.mixture.samples)
        sequence = self.packed[source].sequence(index)
        return replace(sequence, document_lengths=self._cut(number, sequence.document_lengths))

    def document_lengths(self, number: int) -> tuple[int, ...]:
        """The same as `sequence(number).document_lengths`, without reading a token."""
        source, index = self.mixture.sample(number % self.mixture.samples)
        return self._cut(number, self.packed[source].document_lengths(index))

    def tokens_after(self, steps: int) -> dict[str, int]:
        """How much of each source's stream this stage and earlier ones took, after so many steps of the stage."""
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

    def _cut(self, number: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Document lengths, also cut at every multiple of this sequence's visible length."""
        visible = self._visible_tokens(number)
        if visible >= self.seq_len:
            return lengths
        cut, begin = [], 0
        for length in lengths:
            edges = [begin, *range((begin // visible + 1) * visible, begin + length, visible), begin + length]
            cut += [stop - start for start, stop in itertools.pairwise(edges)]
            begin += length
        return tuple(cut)

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
    streams: Mapping[str, TokenStream], seq_len: int, data: ResolvedStageData, step_sequences: int, block: int = 0
) -> StageSamples | None:
    """Held-out sequences of a stage's sources, in the stores' own order; None if those sources hold nothing out.

    Args:
        data: the stage's; its mixture is not empty.
        step_sequences: sequences of one round on all ranks.
        block: tokens that attend to each other, counted from each sequence's start; 0: all.
    """
    mixture = {name: data.mixture[name] for name in streams if data.mixture.get(name)}
    if not mixture:
        return None
    plain = replace(data, mixture=mixture, packing="concat", max_epochs={}, growth_from=0)
    cut = replace(plain, short_share=float(block > 0), short_seq_len=block)
    return StageSamples(streams, seq_len, cut, 0, 0, step_sequences, {}, steps=1 << 20)
