"""Bins of positions by powers of two: loss by position, of training and of validation."""

import torch
from torch import Tensor

FIRST_BIN_TOKENS = 16


def bin_starts(seq_len: int) -> list[int]:
    """First position of each bin of a sequence of S tokens: 0, 16, 32, 64, … below S."""
    starts, edge = [0], FIRST_BIN_TOKENS
    while edge < seq_len:
        starts.append(edge)
        edge *= 2
    return starts


def sum_by_bin(losses: Tensor, counted: Tensor, positions: Tensor, seq_len: int) -> Tensor:
    """Losses and tokens of each bin. Sums over ranks and micro-batches are sums of this; the mean is row 0 over row 1.

    Args:
        losses: of each token, `[B, S/cp]`, 0 where not counted.
        counted: `[B, S/cp]` bool, tokens that have a label.
        positions: `[S/cp]` or `[B, S/cp]` int64, below `seq_len`.

    Returns:
        `[2, bins]` fp64, (sum, count), on the device of `losses`.
    """
    starts = bin_starts(seq_len)
    edges = torch.tensor(starts[1:], device=positions.device)
    return sum_by_index(losses, counted, torch.bucketize(positions, edges, right=True), len(starts))


def sum_by_index(losses: Tensor, counted: Tensor, index: Tensor, size: int) -> Tensor:
    """The same by any index `[S/cp]` or `[B, S/cp]` int64 below `size`: `[2, size]` fp64.

    index_add_ does not wait for the device, and has a deterministic form, neither of which bincount has on CUDA.
    """
    pairs = torch.stack([losses.double().flatten(), counted.double().flatten()])
    return pairs.new_zeros(2, size).index_add_(1, index.expand(losses.shape).flatten(), pairs)
