"""Bins of positions by powers of two, for loss by position in training and evaluation."""

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
    """Sum the losses and count the tokens of each bin. Results of ranks and micro-batches can be added up.

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
    """As sum_by_bin for any index, `[S/cp]` or `[B, S/cp]` int64 below `size`: `[2, size]` fp64.

    On CUDA, index_add_ does not synchronize and has a deterministic form; bincount does and has none.
    """
    pairs = torch.stack([losses.double().flatten(), counted.double().flatten()])
    return pairs.new_zeros(2, size).index_add_(1, index.expand(losses.shape).flatten(), pairs)
