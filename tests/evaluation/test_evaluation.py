"""Held-out loss over all ranks, and the unigram model beside it."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import RankPool
from torchtitan_cp.evaluation import mean_loss, unigram_loss


def test_unigram_loss_is_that_of_the_frequencies_plus_one() -> None:
    counts = np.array([7, 1, 0])
    by_hand = -(math.log(8 / 11) + math.log(2 / 11) + 2 * math.log(1 / 11)) / 4
    assert unigram_loss(counts, np.array([[0, 1], [2, 2]])) == pytest.approx(by_hand)


def run_mean() -> tuple[float, bool, bool]:
    """Each rank has other tokens, and another number of unmasked ones."""
    rank, model = dist.get_rank(), nn.Dropout().train()
    seen = []

    def losses(batch: int) -> tuple[Tensor, Tensor]:
        seen.append(model.training or torch.is_grad_enabled())
        return torch.tensor(10.0 * rank + batch), torch.tensor(1 + 3 * rank)

    return mean_loss(model, [1, 2], losses), any(seen), model.training


def test_mean_loss_divides_the_sum_of_all_ranks_once_by_the_tokens_of_all(ranks: Callable[[int], RankPool]) -> None:
    for loss, trained_or_differentiated, training_after in ranks(2)(run_mean):
        assert loss == pytest.approx((1 + 2 + 11 + 12) / (1 + 1 + 4 + 4))
        assert not trained_or_differentiated
        assert training_after
