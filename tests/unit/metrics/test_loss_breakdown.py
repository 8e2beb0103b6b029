"""Losses by position, document and source against loops."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from torchtitan_cp.metrics.loss_breakdown import LossBreakdown, bin_starts, sum_by_bin


def bin_of(position: int) -> str:
    return str(0 if position < 16 else 2 ** (position.bit_length() - 1))


def test_bins_are_powers_of_two_from_16() -> None:
    assert bin_starts(100) == [0, 16, 32, 64]
    assert bin_starts(64) == [0, 16, 32]
    assert bin_starts(1) == [0]


def test_each_token_counts_once_in_its_bins_and_its_source() -> None:
    generator = np.random.default_rng()
    breakdown = LossBreakdown(100, ["a", "b", "never"], torch.device("cpu"))
    want: dict[tuple[str, str], list[float]] = {}
    for sources in (("a", "b"), ("b", "b")):
        losses = generator.random((2, 50)).astype(np.float32)
        counted, within = generator.random((2, 50)) < 0.8, generator.integers(0, 100, (2, 50))
        positions = generator.permutation(100)[:50]
        breakdown.add(*map(torch.from_numpy, (losses * counted, counted, positions, within)), sources)
        for row, column in np.argwhere(counted):
            for kind, key in (
                ("position", bin_of(int(positions[column]))),
                ("document", bin_of(int(within[row, column]))),
                ("source", sources[row]),
            ):
                want.setdefault((kind, key), []).append(float(losses[row, column]))
    means = breakdown.means()
    got = {("position", key): loss for key, loss in means["loss_by_position"].items()}
    got |= {("document", key): loss for key, loss in means["loss_by_document_position"].items()}
    got |= {("source", key): loss for key, loss in means["loss_by_source"].items()}
    assert got == pytest.approx({key: np.mean(losses) for key, losses in want.items()}, rel=1e-6)
    assert breakdown.sums[1, -3:].sum() == sum(len(losses) for (kind, _), losses in want.items() if kind == "source")


def test_bins_of_a_million_tokens_and_more_begin_where_they_say() -> None:
    edges = [1 << power for power in range(40)]
    positions = torch.tensor([edge + offset for edge in edges for offset in (-1, 0)])
    ones = torch.ones(1, len(positions))
    counts = sum_by_bin(ones, ones.bool(), positions, 1 << 40)[1]
    starts = [*bin_starts(1 << 40), 1 << 40]
    want = [((positions >= first) & (positions < end)).sum().item() for first, end in pairwise(starts)]
    assert counts.tolist() == want
