"""Results of an evaluation: accuracy at a length, and what is said and plotted."""

import math

import numpy as np

from torchtitan_cp.evaluation.result import Baseline, EvaluationResult, Retrieval


def test_accuracy_at_a_length_is_of_the_longest_up_to_it_and_unknown_if_that_was_not_tried() -> None:
    nothing = math.nan
    found = Retrieval(np.array([[1.0, 0.5, nothing], [0.5, nothing, nothing]]), (64, 128, 256), (0.0, 1.0))
    assert found.at(64) == found.at(127) == 0.75
    assert found.at(128) == found.at(255) == 0.5
    assert found.at(256) is found.at(1000) is found.at(63) is None


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


def test_the_loss_on_a_stages_own_mixture_is_said_and_plotted_beside_the_loss_where_they_differ() -> None:
    one = EvaluationResult(2.0, 3.0, {"a": 2.0}, [0], [2.0], stage_loss=2.0)
    assert "own mixture" not in next(one.lines(7, 128))
    assert "stage_loss" not in one.scalars(128), "one source, one number"
    two = EvaluationResult(2.0, 3.0, {"a": 2.0, "b": 4.0}, [0], [2.0], stage_loss=3.5)
    assert next(two.lines(7, 128)).endswith("(a unigram model: 3.0000); 3.5000 on the stage's own mixture")
    assert (two.scalars(128)["loss"], two.scalars(128)["stage_loss"]) == (2.0, 3.5)
    assert two.to_json()["stage_loss"] == 3.5


def test_what_changed_since_step_0_is_said_of_what_was_measured_both_times() -> None:
    def passkey(*accuracy: float) -> Retrieval:
        return Retrieval(np.array([accuracy]), (64, 128), (0.0,))

    before = Baseline(5.0, {"a": 6.0, "b": None}, passkey(0.25, math.nan))
    result = EvaluationResult(
        2.0, 3.0, {"a": 2.5, "b": 1.0, "c": math.nan}, [0], [2.0], retrieval={"passkey": passkey(1.0, 0.5)}
    )
    assert result.since(before, 64) == {"loss": -3.0, "loss_by_source/a": -3.5, "passkey_accuracy": 0.75}
    said = "since step 0: loss -3.0000, a -3.5000, passkey right +75 points"
    assert said in list(result.lines(7, 64, before))
    assert not [line for line in result.lines(7, 64) if "since" in line]
    assert result.since(before, 128) == {"loss": -3.0, "loss_by_source/a": -3.5}
    alone = EvaluationResult(2.0, 3.0, {"a": 2.0}, [0], [2.0])
    assert list(alone.lines(7, 64, before._replace(passkey=None)))[-1] == "since step 0: loss -3.0000"
    nothing = Baseline(None, {}, None)
    assert not [line for line in result.lines(7, 64, nothing) if "since" in line]


def test_what_was_not_measured_has_a_line_for_each_reason() -> None:
    result = EvaluationResult(2.0, 3.0, {}, [0], [2.0], left_out=("context gain: too short", "passkey: no time"))
    assert list(result.lines(7, 64))[-2:] == ["not measured: context gain: too short", "not measured: passkey: no time"]
    assert not [line for line in result.lines(7, 64, brief=True) if "not measured" in line]


def test_accuracy_is_plotted_by_length_and_of_many_lengths_those_of_stages_and_the_longest() -> None:
    def plotted(*lengths: int) -> set[str]:
        found = Retrieval(np.ones((2, len(lengths))), lengths, (0.0, 1.0))
        result = EvaluationResult(2.0, 3.0, {}, [0], [2.0], retrieval={"passkey": found})
        return {name for name in result.scalars(256, [256, 1000]) if "by_length" in name}

    assert plotted(128, 256) == {"passkey_by_length/128", "passkey_by_length/256"}
    many = [32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert plotted(*many) == {f"passkey_by_length/{length}" for length in ("256", "512", "4K")}


def test_the_near_end_is_a_sixteenth_into_the_sequence_and_the_far_end_its_last_bin() -> None:
    starts = [0, 16, 32, 64, 128, 256, 512]
    result = EvaluationResult(2.0, 3.0, {}, starts, [float(start) for start in starts])
    assert result.end_losses(1024) == {"near": 64.0, "far": 512.0}
    assert result.end_losses(512) == {"near": 32.0, "far": 256.0}, "losses beyond the stage's length do not count"
    assert EvaluationResult(2.0, 3.0, {}, [0], [2.0]).end_losses(16) == {}
    plotted = EvaluationResult(2.0, 3.0, {}, [0, 16], [2.0, math.nan]).scalars(32)
    assert [name for name in plotted if "end" in name] == ["loss_at_end/near"]
