"""Held-out text: the unigram model beside the network, what evaluation does to a module, and its share of the time."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from torchtitan_cp.evaluation.held_out import Budget, evaluating, unigram_loss


def test_unigram_loss_is_that_of_the_frequencies_plus_one() -> None:
    counts = np.array([7, 1, 0])
    by_hand = -(math.log(8 / 11) + math.log(2 / 11) + 2 * math.log(1 / 11)) / 4
    assert unigram_loss(counts, np.bincount([0, 1, 2, 2])) == pytest.approx(by_hand)


def test_a_model_is_evaluated_without_gradients_and_dropout_and_trains_again_after_an_error_too() -> None:
    model = nn.Dropout().train()
    with evaluating(model):
        assert not model.training
        assert not torch.is_grad_enabled()
    with pytest.raises(ValueError, match="broken"), evaluating(model):
        raise ValueError("broken")
    assert model.training
    assert torch.is_grad_enabled()


def test_a_budget_says_no_where_the_next_tokens_would_go_beyond_its_share() -> None:
    budget = Budget(0.1, trained_seconds=90.0, evaluation_seconds=5.0, token_seconds=0.5)
    assert budget.affords(10), "10 of 100 seconds"
    assert not budget.affords(11)
    assert Budget(1.0, evaluation_seconds=5.0, token_seconds=0.5).affords(1000), "all of the time"
    assert not Budget(0.0, trained_seconds=90.0, evaluation_seconds=0.1).affords(1)
    with budget.spending(tokens=4):
        pass
    assert 5.0 < budget.evaluation_seconds < 6.0
    assert budget.token_seconds == pytest.approx((budget.evaluation_seconds - 5.0) / 4)


def test_before_the_first_step_a_budget_takes_a_trained_token_for_three_evaluated_ones() -> None:
    budget = Budget(0.25, planned_tokens=100)  # 300 evaluated tokens' time, of which a third is a quarter of all
    assert budget.affords(100)
    assert not budget.affords(101)
    budget.token_seconds, budget.evaluation_seconds = 0.5, 20.0  # 40 tokens
    assert budget.affords(60)
    assert not budget.affords(61)
    budget.trained_seconds = 3.0
    assert not budget.affords(1), "from then on the clock counts"
    assert not Budget(0.0, planned_tokens=100).affords(1)


def test_a_unigram_model_of_no_labels_has_no_loss() -> None:
    assert math.isnan(unigram_loss(np.array([7, 1, 0]), np.zeros(3, dtype=np.int64)))
