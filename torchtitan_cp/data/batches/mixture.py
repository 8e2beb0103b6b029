"""Which source gives which sample of a stage: by weight, evenly spread, and computed from its number alone."""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

CHUNK_SAMPLES = 4096
UNLIMITED = 1 << 50  # samples; times stay exact enough to be ordered up to here


class _Chunk(NamedTuple):
    """CHUNK_SAMPLES samples from a multiple of it on.

    Attributes:
        sources: `[samples]` int64, the source of each.
        indices: `[samples]` int64, how many samples of that source came before.
        before: `[sources]` int64, samples of each source before the chunk.
    """

    sources: np.ndarray
    indices: np.ndarray
    before: np.ndarray


class Mixture:
    """The order of sources in a stage. A sample depends only on the arguments and its number.

    A source of share w gives its j-th sample at time (j + phase) / w, and samples are numbered in the order of time;
    phases come from seed and stage. So among the first n samples a source has n * w, plus or minus 1 + w * sources;
    a source that has given its last sample leaves its share to the others, by their weights. (Megatron-LM's blending
    has the same aim, but goes through the samples one after another.)

    Args:
        weights: of each source, 0 or more, with any sum above 0. Their order does not matter.
        seed, stage: another of either gives another order, with the same shares.
        limits: samples that a source has left, for the sources that have a limit.

    Attributes:
        samples: the total number until every source is used up.
    """

    def __init__(self, weights: Mapping[str, float], seed: int, stage: int, limits: Mapping[str, int]) -> None:
        self.names = tuple(sorted(name for name, weight in weights.items() if weight > 0))
        total = math.fsum(weights[name] for name in self.names)
        self._shares = np.array([weights[name] / total for name in self.names])
        self._limits = np.array([min(limits.get(name, UNLIMITED), UNLIMITED) for name in self.names], dtype=np.int64)
        self._phases = np.array([_phase(name, seed, stage) for name in self.names])
        self.samples = int(self._limits.sum())
        self._chunk = lru_cache(maxsize=4)(self._make_chunk)

    def sample(self, number: int) -> tuple[str, int]:
        """Source of sample `number`, and how many samples of that source came before in the stage."""
        assert number < self.samples, "every source has given its last sample"
        index, offset = divmod(number, CHUNK_SAMPLES)
        chunk = self._chunk(index)
        return self.names[chunk.sources[offset]], int(chunk.indices[offset])

    def counts(self, number: int) -> dict[str, int]:
        """Samples of each source among the first `number`, at most `samples`."""
        assert 0 <= number <= self.samples, "the mixture ends earlier"
        index, offset = divmod(number, CHUNK_SAMPLES)
        chunk = self._chunk(index)
        counts = chunk.before + np.bincount(chunk.sources[:offset], minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

    @cached_property
    def ends(self) -> dict[str, int]:
        """For each limited source, the number of samples after which it has given its last one."""
        return {name: self._end(index) for index, name in enumerate(self.names) if self._limits[index] < UNLIMITED}

    def _end(self, index: int) -> int:
        name, limit = self.names[index], int(self._limits[index])
        last = self._counts_at((limit + 1) / self._shares[index])
        return bisect_left(range(int(last.sum())), limit, key=lambda number: self.counts(number)[name])

    def _make_chunk(self, index: int) -> _Chunk:
        start = index * CHUNK_SAMPLES
        stop = min(start + CHUNK_SAMPLES, self.samples)
        slack = len(self.names) + 1
        first, last = self._counts_at(self._time(start - slack)), self._counts_at(self._time(stop + slack))
        given = last - first
        sources = np.repeat(np.arange(len(self.names)), given)
        indices = np.arange(given.sum()) + np.repeat(first - (np.cumsum(given) - given), given)
        order = np.lexsort((sources, (indices + self._phases[sources]) / self._shares[sources]))
        before, here = np.split(order, [start - int(first.sum())])
        here = here[: stop - start]
        return _Chunk(sources[here], indices[here], first + np.bincount(sources[before], minlength=len(self.names)))

    def _counts_at(self, time: float) -> np.ndarray:
        """Samples each source has given up to a time: `[sources]` int64."""
        given = np.floor(time * self._shares - self._phases) + 1
        return np.clip(given, 0, self._limits).astype(np.int64)

    def _time(self, number: float) -> float:
        """When `number` samples were given, up to one for each source: the inverse of sum(min(limit, time * share))."""
        ends = np.unique(np.concatenate([[0.0], self._limits / self._shares]))
        given = np.minimum(self._limits, ends[:, None] * self._shares).sum(axis=1)
        return float(np.interp(number, given, ends)) + max(0.0, number - float(given[-1]))


def samples_within(max_epochs: float, tokens: int, seq_len: int, first_token: int) -> int:
    """How many sequences of S tokens a source has left before it was read `max_epochs` times.

    Args:
        max_epochs: how often the source may be read in the whole run, as a float.
        tokens: what the source holds, read once.
        seq_len: S.
        first_token: cursor of the source at which the stage begins.
    """
    return max(0, math.floor(max_epochs * tokens) - first_token) // seq_len


def _phase(name: str, seed: int, stage: int) -> float:
    """A number in (0, 1) that differs by source, seed and stage."""
    digest = hashlib.sha256(f"{seed} {stage} {name}".encode()).digest()
    return (int.from_bytes(digest[:4], "little") + 0.5) / (1 << 32)
