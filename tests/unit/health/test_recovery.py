"""Skip, roll back, halt: in this order, each so often and no oftener."""

import dataclasses
import json
from pathlib import Path

import pytest

from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.config.run import Health
from torchtitan_cp.health.recovery import MAX_SKIPS, NonFiniteError, RecoveryPolicy

WHAT = "step 3 (stage 1, 4K) is not healthy: rank 1: the loss is nan"
CHECKPOINT = (Path("step-7"), Progress(step=7))


def policy_of(**settings: object) -> RecoveryPolicy:
    return RecoveryPolicy(Health(**{"on_nonfinite": "skip"} | settings), {})  # type: ignore[arg-type]


def decide(it: RecoveryPolicy, *, can_roll_back: bool = True, weights_finite: bool = True) -> str:
    find = lambda _: CHECKPOINT if can_roll_back else None  # noqa: E731
    message, checkpoint = it.choose_action(WHAT, find, weights_finite=weights_finite)
    assert ("ROLLED BACK to step-7" in message) == (checkpoint == CHECKPOINT)
    return "rollback" if checkpoint else "skip"


def climb(it: RecoveryPolicy, *, can_roll_back: bool = True) -> list[str]:
    """What follows bad steps without end."""
    taken: list[str] = []
    while len(taken) < 99:
        try:
            taken.append(decide(it, can_roll_back=can_roll_back))
        except NonFiniteError:
            return taken
    pytest.fail("it has no end")


def test_halt_raises_with_the_step_and_the_finding() -> None:
    with pytest.raises(NonFiniteError, match=r"step 3 \(stage 1, 4K\) is not healthy: rank 1: the loss is nan. No wei"):
        decide(policy_of(on_nonfinite="halt"))


def test_skips_and_rollbacks_come_in_order_and_each_so_often() -> None:
    skips = ["skip"] * MAX_SKIPS
    it = policy_of(max_rollbacks=2)
    assert climb(it) == [*skips, "rollback", *skips, "rollback", *skips]
    assert (it.state.all_skips, it.state.rollbacks) == (3 * (MAX_SKIPS + 1), 2)


def test_without_a_checkpoint_or_a_rollback_left_the_run_halts_after_its_skips() -> None:
    assert climb(policy_of(), can_roll_back=False) == ["skip"] * MAX_SKIPS
    assert climb(policy_of(max_rollbacks=0)) == ["skip"] * MAX_SKIPS


@pytest.mark.parametrize(("rollbacks", "why"), [(0, "health.max_rollbacks = 0"), (1, "there is no checkpoint to load")])
def test_the_end_says_what_was_tried(rollbacks: int, why: str) -> None:
    it = policy_of(max_rollbacks=rollbacks)
    assert [decide(it) for _ in range(MAX_SKIPS)] == ["skip"] * MAX_SKIPS
    tried = rf"{MAX_SKIPS} skipped steps in a row and 0 rollbacks, and {why}\. No weight was"
    with pytest.raises(NonFiniteError, match=tried):
        decide(it, can_roll_back=False)


def test_the_message_says_what_was_done() -> None:
    it = policy_of()
    find = lambda _: CHECKPOINT  # noqa: E731
    for number in range(1, MAX_SKIPS + 1):
        skipped = f"{WHAT}. Skipped: no weight was changed ({number} of at most {MAX_SKIPS} in a row)"
        assert it.choose_action(WHAT, find) == (skipped, None)
    message, checkpoint = it.choose_action(WHAT, find)
    assert checkpoint == CHECKPOINT
    assert message == f"{WHAT}. ROLLED BACK to step-7, and the text since is skipped (1 rollbacks so far)"


def test_skips_are_counted_and_a_good_step_starts_the_count_again() -> None:
    it = policy_of()
    assert (decide(it), it.state.skips) == ("skip", 1)
    it.record_healthy_step()
    for number in range(1, MAX_SKIPS + 1):
        assert (decide(it), it.state.skips) == ("skip", number)
    assert decide(it) == "rollback"


def test_what_does_not_mend_by_itself_is_not_skipped() -> None:
    assert decide(policy_of(), weights_finite=False) == "rollback"


def test_a_run_that_is_bad_again_at_once_after_a_rollback_goes_further_back() -> None:
    it, asked = policy_of(max_rollbacks=9), []

    def find(before: int | None) -> tuple[Path, Progress]:
        asked.append(before)
        return CHECKPOINT

    it.choose_action(WHAT, find, weights_finite=False)
    it.choose_action(WHAT, find, weights_finite=False)
    it.record_healthy_step()
    it.choose_action(WHAT, find, weights_finite=False)
    assert asked == [None, 7, None]


def test_the_state_survives_a_checkpoint() -> None:
    it, skips = policy_of(max_rollbacks=1), ["skip"] * MAX_SKIPS
    assert [decide(it) for _ in range(2 * MAX_SKIPS + 1)] == [*skips, "rollback", *skips]
    resumed = RecoveryPolicy(it.settings, json.loads(json.dumps(dataclasses.asdict(it.state))))
    assert resumed.state == it.state
    with pytest.raises(NonFiniteError):
        decide(resumed)


def test_the_state_of_an_earlier_version_is_read_without_what_is_gone() -> None:
    state = {"skips": 1, "all_skips": 4, "rollbacks": 1, "lr_cuts": 1, "lr_steps_left": 7}
    it = RecoveryPolicy(Health(on_nonfinite="skip"), state)
    assert (it.state.skips, it.state.all_skips, it.state.rollbacks) == (1, 4, 1)
