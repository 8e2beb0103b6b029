"""Skip, roll back, lower the learning rate, halt: in this order, each so often and no oftener."""

import dataclasses
import json

import pytest

from torchtitan_cp.config.sections import Health
from torchtitan_cp.health import NonFiniteError, RecoveryPolicy

WHAT = "step 3 (stage 1, 4K) is not healthy: rank 1: the loss is nan"


def recovery_policy(**settings: object) -> RecoveryPolicy:
    return RecoveryPolicy(Health(on_nonfinite="skip", **settings))  # type: ignore[arg-type]


def climb(it: RecoveryPolicy, *, can_roll_back: bool = True) -> list[str]:
    """What follows bad steps without end."""
    taken: list[str] = []
    while len(taken) < 99:
        if it.trip(WHAT, halts=False):
            taken.append("skip")
            continue
        try:
            taken.append(it.climb(WHAT, can_roll_back=can_roll_back))
        except NonFiniteError:
            return taken
        if can_roll_back:
            it.rolled_back(7)
    pytest.fail("it has no end")


def test_halt_raises_with_the_step_and_the_finding() -> None:
    with pytest.raises(NonFiniteError, match=r"step 3 \(stage 1, 4K\) is not healthy: rank 1: the loss is nan. No wei"):
        recovery_policy().trip(WHAT, halts=True)


def test_the_rungs_come_in_order_and_each_so_often() -> None:
    it = recovery_policy(max_consecutive_skips=1, max_rollbacks=2, max_lr_cuts=2)
    rungs = ["rollback", "rollback", "lower_lr", "lower_lr"]
    assert climb(it) == [part for rung in rungs for part in ("skip", rung)] + ["skip"]
    assert (it.state.all_skips, it.state.rollbacks, it.state.lr_cuts) == (10, 2, 2)


def test_without_a_checkpoint_the_learning_rate_is_next_and_without_any_rung_the_end() -> None:
    assert climb(recovery_policy(max_consecutive_skips=2), can_roll_back=False) == [
        "skip",
        "skip",
        "lower_lr",
        "skip",
        "skip",
    ]
    assert climb(recovery_policy(max_consecutive_skips=1, policy=())) == ["skip"]


def test_the_end_says_what_was_tried() -> None:
    it = recovery_policy(max_consecutive_skips=2, policy=())
    it.trip(WHAT, halts=False)
    it.trip(WHAT, halts=False)
    it.trip(WHAT, halts=False)
    with pytest.raises(NonFiniteError, match=r"after 2 skipped steps in a row, 0 rollbacks and 0 cuts .* no further"):
        it.climb(WHAT, can_roll_back=False)


def test_skips_are_counted_and_a_good_step_starts_the_count_again() -> None:
    it = recovery_policy(max_consecutive_skips=2)
    assert "(1 of at most 2 in a row)" in str(it.trip(WHAT, halts=False))
    it.healthy()
    assert "(1 of at most 2 in a row)" in str(it.trip(WHAT, halts=False))
    assert "(2 of at most 2 in a row)" in str(it.trip(WHAT, halts=False))
    assert it.trip(WHAT, halts=False) is None


def test_what_does_not_mend_by_itself_is_not_skipped() -> None:
    assert recovery_policy().trip(WHAT, halts=False, recoverable=False) is None


def test_the_learning_rate_is_lowered_for_so_many_healthy_steps() -> None:
    it = recovery_policy(lr_factor=0.25, lr_steps=3, max_lr_cuts=2, policy=("lower_lr",))
    assert it.lr_factor == 1.0
    it.climb(WHAT, can_roll_back=False)
    factors = []
    for _ in range(4):
        factors.append(it.lr_factor)
        it.healthy()
    assert factors == [0.25, 0.25, 0.25, 1.0]
    it.climb(WHAT, can_roll_back=False)
    assert it.lr_factor == 0.0625


def test_a_run_that_falls_ill_at_once_after_a_rollback_goes_further_back() -> None:
    it = recovery_policy()
    assert it.steps_too_new is None
    it.rolled_back(40)
    assert it.steps_too_new == 40
    it.healthy()
    assert it.steps_too_new is None


def test_the_state_survives_a_checkpoint() -> None:
    it = recovery_policy(max_consecutive_skips=1, max_rollbacks=1, max_lr_cuts=0)
    it.trip(WHAT, halts=False)
    it.climb(WHAT, can_roll_back=True)
    it.rolled_back(7)
    it.trip(WHAT, halts=False)
    resumed = RecoveryPolicy(it.settings, json.loads(json.dumps(dataclasses.asdict(it.state))))
    assert resumed.state == it.state
    assert resumed.trip(WHAT, halts=False) is None
    with pytest.raises(NonFiniteError):
        resumed.climb(WHAT, can_roll_back=True)
