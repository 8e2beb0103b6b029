"""What a run's evaluations found, read from its lines: the last of each stage, and the one at step 0."""

from torchtitan_cp.metrics.jsonl_sink import EvaluationLine
from torchtitan_cp.training.evaluation_history import START, EvaluationHistory


def line(step: int, stage: str, seq_len: int, *accuracy: float | None) -> EvaluationLine:
    """A line with one key at the top of prompts of 64 and 128 tokens."""
    passkey = {"accuracy": [list(accuracy)], "lengths": [64, 128], "depths": [0.0]}
    return {
        "step": step,
        "stage": stage,
        "seq_len": seq_len,
        "loss": 9.0 - step,
        "by_source": {"a": None},
        "position_starts": [0],
        "position_losses": [float(step)],
        "retrieval": {"passkey": passkey} if accuracy else {},  # type: ignore[typeddict-item]
    }


def test_of_each_stage_the_last_evaluation_is_kept_and_step_0_has_a_row_of_its_own() -> None:
    history = EvaluationHistory()
    assert history.describe_reach() == ""
    assert history.add(line(0, "64", 64, 0.0, 0.1)) == START
    assert history.describe_reach() == "", "no stage has trained"
    assert history.baseline
    assert (history.baseline.loss, history.baseline.by_source) == (9.0, {"a": None})
    assert history.baseline.passkey
    assert history.baseline.passkey.by_length() == {64: 0.0, 128: 0.1}
    history.add(line(5, "64", 64, 0.5, 0.1))
    history.add(line(6, "64", 64, 1.0, 0.2))
    history.add(line(7, "128", 128))
    history.add(line(8, "128", 128, None, None))
    assert history.curves == {START: ([0], [0.0]), "64": ([0], [6.0]), "128": ([0], [8.0])}
    rows, lengths, found = history.reach_map()
    assert (rows, lengths, found.tolist()) == ([(START, 0), ("64", 64)], [64, 128], [[0.0, 0.1], [1.0, 0.2]])
    assert history.describe_reach().startswith("The model finds keys over the stage's length. Longer")


def test_a_step_0_without_prompts_is_no_row() -> None:
    history = EvaluationHistory()
    history.add(line(0, "64", 64))
    assert history.baseline
    assert history.baseline.passkey is None
    assert history.reach == {}
