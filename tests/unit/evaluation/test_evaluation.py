"""The unigram model beside the network, what evaluation does to a module, accuracy at a length, and its time."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from torchtitan_cp.evaluation.held_out import Budget, evaluating, unigram_loss
from torchtitan_cp.evaluation.result import EvaluationResult, Retrieval


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


def test_accuracy_at_a_length_is_of_the_longest_up_to_it_and_unknown_if_that_was_not_tried() -> None:
    nothing = math.nan
    found = Retrieval(np.array([[1.0, 0.5, nothing], [0.5, nothing, nothing]]), (64, 128, 256), (0.0, 1.0))
    assert found.at(64) == found.at(127) == 0.75
    assert found.at(128) == found.at(255) == 0.5
    assert found.at(256) is found.at(1000) is found.at(63) is None


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


def test_losses_by_turn_are_said_and_plotted_where_there_are_conversations() -> None:
    result = EvaluationResult(2.0, 3.0, {}, [0], [2.0], turn_losses=[2.5, math.nan, 1.5, 1.25, 1.0])
    assert "by turn: 1 2.5000, 3 1.5000, 4 1.2500, 5 and later 1.0000" in result.lines(7, 64)
    plotted = {name: value for name, value in result.scalars(64).items() if "turn" in name}
    assert plotted == {
        f"loss_by_turn/{turn}": loss
        for turn, loss in zip(("1", "3", "4", "5_and_later"), (2.5, 1.5, 1.25, 1.0), strict=True)
    }
    assert result.to_json()["turn_losses"] == [2.5, None, 1.5, 1.25, 1.0]
    plain = EvaluationResult(2.0, 3.0, {}, [0], [2.0])
    assert not [line for line in plain.lines(7, 64) if "turn" in line]


def test_held_out_text_that_was_read_again_has_a_line_of_its_own() -> None:
    result = EvaluationResult(2.0, 3.0, {}, [0], [2.0], held_out_epochs={"pq": 2.125, "md": 0.3})
    assert list(result.lines(7, 64))[-1] == "held-out text read more than once: pq 2.1 times (evaluation.tokens)"


def test_a_unigram_model_of_no_labels_has_no_loss() -> None:
    assert math.isnan(unigram_loss(np.array([7, 1, 0]), np.zeros(3, dtype=np.int64)))


def test_the_loss_on_a_stages_own_mixture_is_said_and_plotted_beside_the_loss_where_they_differ() -> None:
    one = EvaluationResult(2.0, 3.0, {"a": 2.0}, [0], [2.0], stage_loss=2.0)
    assert "own mixture" not in next(one.lines(7, 128))
    assert "stage_loss" not in one.scalars(128), "one source, one number"
    two = EvaluationResult(2.0, 3.0, {"a": 2.0, "b": 4.0}, [0], [2.0], stage_loss=3.5)
    assert next(two.lines(7, 128)).endswith("(a unigram model: 3.0000); 3.5000 on the stage's own mixture")
    assert (two.scalars(128)["loss"], two.scalars(128)["stage_loss"]) == (2.0, 3.5)
    assert two.to_json()["stage_loss"] == 3.5
