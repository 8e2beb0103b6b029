"""What follows a bad step: skip it, go back to a checkpoint, lower the learning rate, halt."""

from dataclasses import dataclass, replace
from typing import Any

from torchtitan_cp.config.sections import Health


class NonFiniteError(RuntimeError):
    """A step was bad, and the job is to halt."""


@dataclass(frozen=True)
class RecoveryState:
    """How far up the ladder a run is, as plain JSON in its checkpoints.

    Attributes:
        skips: bad steps in a row since a healthy one or the last rung; all_skips: of the run.
        bad_steps: in a row since a healthy one or a rollback: a checkpoint with any is not to be gone back to.
        rollbacks, lr_cuts: taken in the run.
        lr_steps_left: healthy steps until the learning rate is as scheduled again; 0: it is.
        healthy_steps: since the last rollback, or the run's start.
        rolled_back_to: step of the checkpoint that was loaded last; -1: none was.
        replays: of which the tensors were kept.
    """

    skips: int = 0
    all_skips: int = 0
    bad_steps: int = 0
    rollbacks: int = 0
    lr_cuts: int = 0
    lr_steps_left: int = 0
    healthy_steps: int = 0
    rolled_back_to: int = -1
    replays: int = 0


class RecoveryPolicy:
    """Counts bad steps and says what is to be done about them.

    Args:
        settings: [health].
        state: carried over from a checkpoint, as its fields by name.
    """

    def __init__(self, settings: Health, state: dict[str, Any] | None = None) -> None:
        self.settings, self.state = settings, RecoveryState(**(state or {}))

    @property
    def lr_factor(self) -> float:
        """What the learning rate is multiplied with now."""
        return self.settings.lr_factor**self.state.lr_cuts if self.state.lr_steps_left else 1.0

    def healthy(self) -> None:
        """A step was taken: a row of bad ones has ended."""
        state = self.state
        self.state = replace(
            state,
            skips=0,
            bad_steps=0,
            healthy_steps=state.healthy_steps + 1,
            lr_steps_left=max(0, state.lr_steps_left - 1),
        )

    def trip(self, what: str, *, halts: bool, recoverable: bool = True) -> str | None:
        """A step was bad, and no weight was changed.

        Args:
            what: the step and stage, and what was bad.
            halts: at the first bad step, whatever the policy is.
            mends_itself: the next step may be well; not where a weight is ill.

        Returns:
            what to log where skipping it is enough; None where it is time to climb.

        Raises:
            NonFiniteError: the job is to halt at once.
        """
        state, limit = self.state, self.settings.max_consecutive_skips
        self.state = replace(state, skips=state.skips + 1, all_skips=state.all_skips + 1, bad_steps=state.bad_steps + 1)
        if halts:
            raise NonFiniteError(
                f"{what}. No weight was changed.\n  fix: look at the data and the learning rate of "
                'this step; health.on_nonfinite = "skip" passes over such steps'
            )
        if self.state.skips > limit or not recoverable:
            return None
        return f"{what}. Skipped: no weight was changed ({self.state.skips} of at most {limit} in a row)"

    @property
    def steps_too_new(self) -> int | None:
        """Checkpoints of this step or a later one are no use: the run fell ill at once after going back to it."""
        state = self.state
        return state.rolled_back_to if state.rolled_back_to >= 0 and not state.healthy_steps else None

    def climb(self, what: str, *, can_roll_back: bool) -> str:
        """Take the next rung: `rollback` or `lower_lr`.

        Args:
            what: as for `trip`.
            can_roll_back: there is a checkpoint to go back to.

        Raises:
            NonFiniteError: there is none left.
        """
        settings, state = self.settings, replace(self.state, skips=0)
        if "rollback" in settings.policy and can_roll_back and state.rollbacks < settings.max_rollbacks:
            self.state = replace(state, rollbacks=state.rollbacks + 1)
            return "rollback"
        if "lower_lr" in settings.policy and state.lr_cuts < settings.max_lr_cuts:
            self.state = replace(state, lr_cuts=state.lr_cuts + 1, lr_steps_left=settings.lr_steps)
            return "lower_lr"
        raise NonFiniteError(
            f"{what}. It comes after {self.state.skips - 1} skipped steps in a row, {state.rollbacks} rollbacks and "
            f"{state.lr_cuts} cuts of the learning rate, and health.policy = {list(settings.policy)} goes no further. "
            "No weight was changed.\n  fix: resume from the last checkpoint with a lower learning rate"
        )

    def rolled_back(self, step: int) -> None:
        """The checkpoint of a step was loaded."""
        self.state = replace(self.state, bad_steps=0, healthy_steps=0, rolled_back_to=step)
