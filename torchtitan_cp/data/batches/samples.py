"""A stage's sequences by number, whatever sources they come from: what is trained on, and in which order."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_cp.data.batches.mixture import Mixture, samples_within
from torchtitan_cp.data.batches.packing import PackedSequence, PackedStream, Packing
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.errors import DataError

GOLDEN = 0.6180339887498949  # multiples of it spread evenly over [0, 1): which sequences are short


@dataclass(frozen=True)
class Sampling:
    """How a stage takes its text.

    Attributes:
        weights: of each source, of any sum.
        packing: how documents become sequences.
        short_share: share of the sequences that are cut into shorter ones, which attend to themselves only.
        short_seq_len: tokens of those.
        growth_from: tokens that attention sees in the stage's first step, 0 for all; the sequence is cut into
            stretches of so many.
        growth_steps: steps after which it sees the whole sequence, linearly from there. Source: SkyLadder (Zhu et
            al., 2025).
        max_epochs: per source, how often it may be read in the whole run.
    """

    weights: Mapping[str, float]
    packing: Packing
    short_share: float
    short_seq_len: int
    growth_from: int
    growth_steps: int
    max_epochs: Mapping[str, float]


class StageSamples:
    """The sequences of a stage. Each depends on the arguments and its number alone.

    Args:
        streams: of each source, by name.
        seq_len: S.
        sampling: how the stage takes them.
        seed: of the run; stage: number of the stage.
        step_sequences: sequences of one optimizer step.
        first_tokens: of each source, how much of its stream earlier stages took.
        steps: optimizer steps that the stage has at most.
        passed: steps of text beyond those, as so many were passed over. Where sources have ended, what the stage began
            with comes again in their place.

    Raises:
        DataError: the weights name no source that there is, or the sources end before the stage does.
    """

    def __init__(
        self,
        streams: Mapping[str, TokenStream],
        seq_len: int,
        sampling: Sampling,
        seed: int,
        stage: int,
        step_sequences: int,
        first_tokens: Mapping[str, int],
        steps: int,
        passed: int = 0,
    ) -> None:
        self._made_of = (streams, seq_len, sampling, seed, stage, step_sequences, dict(first_tokens), steps, passed)
        _check_names(sampling, streams)
        self.seq_len, self.sampling, self.step_sequences = seq_len, sampling, step_sequences
        self.first_tokens = dict(first_tokens)
        limits = {
            name: samples_within(epochs, streams[name].store.tokens, seq_len, self.first_tokens.get(name, 0))
            for name, epochs in sampling.max_epochs.items()
            if sampling.weights.get(name)
        }
        self.mixture = Mixture(sampling.weights, seed, stage, limits)
        samples = steps * step_sequences
        if samples > self.mixture.samples:
            raise DataError(
                f"data.max_epochs leaves stage {stage + 1} {self.mixture.samples:,} sequences of {seq_len:,} tokens, "
                f"and it has {samples:,}",
                fix="raise it, leave a source without one, or make the stage shorter",
            )
        self.packed = {
            name: PackedStream(
                streams[name],
                seq_len,
                sampling.packing,
                source=name,
                first_token=self.first_tokens.get(name, 0),
                samples=count,
            )
            for name, count in self._counts(steps + passed).items()
        }

    def __reduce__(self) -> Any:
        return StageSamples, self._made_of

    def sequence(self, number: int) -> PackedSequence:
        """Sequence `number` of the stage."""
        source, index = self.mixture.sample(number % self.mixture.samples)
        sequence = self.packed[source].sequence(index)
        return replace(sequence, document_lengths=self._cut(number, sequence.document_lengths))

    def document_lengths(self, number: int) -> tuple[int, ...]:
        """What attends to itself only, in tokens, as of `sequence(number)`; no token is read."""
        source, index = self.mixture.sample(number % self.mixture.samples)
        return self._cut(number, self.packed[source].document_lengths(index))

    def tokens_after(self, steps: int) -> dict[str, int]:
        """How much of each source's stream was taken after so many steps of the stage, and by stages before it."""
        counts = self._counts(steps)
        return self.first_tokens | {name: self.packed[name].cursor_after(count) for name, count in counts.items()}

    def epochs_after(self, steps: int) -> dict[str, float]:
        """How often each of the stage's sources was read after so many steps of the stage."""
        counts = self._counts(steps)
        return {name: self.packed[name].epochs(count) for name, count in counts.items()}

    def _counts(self, steps: int) -> dict[str, int]:
        """Sequences of each source in so many steps of the stage."""
        return self.mixture.counts(min(steps * self.step_sequences, self.mixture.samples))

    def _cut(self, number: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Lengths of documents that are also cut at every `block` tokens of the sequence."""
        block = self._block(number)
        if block >= self.seq_len:
            return lengths
        cut, place = [], 0
        for length in lengths:
            edges = [place, *range((place // block + 1) * block, place + length, block), place + length]
            cut += [stop - start for start, stop in itertools.pairwise(edges)]
            place += length
        return tuple(cut)

    def _block(self, number: int) -> int:
        """Tokens that a token of this sequence may see."""
        sampling, block = self.sampling, self.seq_len
        step = number // self.step_sequences
        if sampling.growth_from and step < sampling.growth_steps:
            block = sampling.growth_from + (self.seq_len - sampling.growth_from) * step // sampling.growth_steps
        # The multiple's place in a sequence of its own, so that every source gets its share of short ones.
        if (number * GOLDEN) % 1 < sampling.short_share:
            block = min(block, sampling.short_seq_len)
        return block


def _check_names(sampling: Sampling, streams: Mapping[str, TokenStream]) -> None:
    for what, named in (("mixture", sampling.weights), ("data.max_epochs", sampling.max_epochs)):
        unknown = sorted(set(named) - set(streams))
        if unknown:
            raise DataError(
                f"{what} names {', '.join(map(repr, unknown))}, and the sources are {', '.join(streams)}",
                fix="use the names of [[data.sources]]; the one that [data] itself describes is 'corpus'",
            )


def held_out_samples(
    streams: Mapping[str, TokenStream],
    seq_len: int,
    weights: Mapping[str, float],
    packing: Packing,
    sequences: int,
    block: int = 0,
) -> StageSamples | None:
    """Sequences to measure on, in the stores' own order, from the sources that hold something out; None if none does.

    Args:
        weights: of the stage's sources.
        sequences: of one round on all ranks.
        block: tokens that may see each other, in stretches from each sequence's begin; 0: all.
    """
    held = {name: weights[name] for name, stream in streams.items() if weights.get(name)}
    if not held:
        return None
    plain = replace(packing, method="concat")
    cut = float(block > 0)
    sampling = Sampling(held, plain, cut, block, growth_from=0, growth_steps=0, max_epochs={})
    return StageSamples(streams, seq_len, sampling, 0, 0, sequences, {}, steps=1 << 20)
