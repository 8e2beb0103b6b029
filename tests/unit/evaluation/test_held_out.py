"""Held-out text: the unigram model beside the network, what evaluation does to a module, and its share of the time."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from torchtitan_cp.evaluation.held_out import Budget, evaluating, is_due, unigram_loss


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


def test_a_budget_gives_half_of_its_share_where_the_rest_is_kept_for_later() -> None:
    budget = Budget(0.1, trained_seconds=95.0, token_seconds=0.5)
    assert budget.affords(10, part=0.5), "5 of 100 seconds"
    assert not budget.affords(11, part=0.5)


def test_a_budget_says_which_share_would_have_been_enough() -> None:
    budget = Budget(0.1, trained_seconds=90.0, evaluation_seconds=5.0, token_seconds=0.5)
    for tokens in (11, 50, 1000):
        share = budget.share_with(tokens)
        assert Budget(share, 90.0, 5.0, 0.5).affords(tokens)
        assert not Budget(0.9 * share, 90.0, 5.0, 0.5).affords(tokens)
    assert budget.share_with(11) == 0.11
    assert Budget(0.0, trained_seconds=90.0, evaluation_seconds=0.1).share_with(1) == 0.0012
    assert Budget(0.1).share_with(10) == 1.0
    assert Budget(0.1, trained_seconds=1.0).share_with(10) == 0.0, "nothing is known of the time that a token takes"


def test_a_stage_is_evaluated_about_ten_times_unless_it_is_short_or_an_interval_is_given() -> None:
    def due(interval: int, stage_steps: int, before: int = 7) -> list[int]:
        return [n for n in range(1, stage_steps + 1) if is_due(interval, before + n, n, stage_steps)]

    assert due(-1, 1000) == list(range(100, 1001, 100))
    assert due(-1, 155) == [16 * n for n in range(1, 10)]
    assert due(-1, 35) == [10, 20, 30]
    assert due(-1, 9) == due(0, 1000) == []
    assert due(25, 60) == [18, 43], "an interval counts the steps of the run"


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
