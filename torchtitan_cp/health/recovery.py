"""What follows a bad step: skip it, roll back to a checkpoint, halt."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, TypeVar

from torchtitan_cp.config.run import Health


class SavedStep(Protocol):
    """The progress of a checkpoint."""

    @property
    def step(self) -> int: ...


Saved = TypeVar("Saved", bound=SavedStep)
# (step or None) -> path and progress of the newest good checkpoint, older than the step if one is given.
FindCheckpoint = Callable[[int | None], tuple[Path, Saved] | None]
# A message for the log; path and progress of the checkpoint to load, or None to keep the weights as they are.
Recovery = tuple[str, tuple[Path, Saved] | None]
# A bad document or a flipped bit spoils a step or two; what spoils five in a row comes again.
MAX_SKIPS = 5


class NonFiniteError(RuntimeError):
    """A step had non-finite values (or a spike that counts as such), and [health] says that the job ends."""


@dataclass
class RecoveryState:
    """Counts of bad steps and of what followed them, saved in checkpoints as plain JSON.

    Attributes:
        skips: bad steps in a row, since a healthy step or the last rollback.
        all_skips, rollbacks: totals since the run began, with those before it was resumed.
        bad_steps: in a row, since a healthy step or a rollback; a checkpoint saved amid them is not rolled back to.
        healthy_steps: since the last rollback, or the run's start.
        rolled_back_to: step of the checkpoint that the last rollback loaded; -1: none.
        replays: bad steps for which a bundle was written.
    """

    skips: int = 0
    all_skips: int = 0
    bad_steps: int = 0
    rollbacks: int = 0
    healthy_steps: int = 0
    rolled_back_to: int = -1
    replays: int = 0


class RecoveryPolicy:
    """Counts bad steps and chooses what follows each.

    Args:
        settings: what follows a bad step, and how often.
        state: fields of RecoveryState by name, from a checkpoint. Those of earlier versions are not read.
    """

    def __init__(self, settings: Health, state: Mapping[str, int]) -> None:
        known = {entry.name for entry in fields(RecoveryState)}
        self.settings = settings
        self.state = RecoveryState(**{name: value for name, value in state.items() if name in known})

    def record_healthy_step(self) -> None:
        """Count a step that was taken; it ends a row of bad steps."""
        state = self.state
        state.skips = state.bad_steps = 0
        state.healthy_steps += 1

    def choose_action(
        self, problem: str, find_checkpoint: FindCheckpoint[Saved], *, weights_finite: bool = True
    ) -> Recovery[Saved]:
        """Count a bad step, which has changed no weight, and choose what follows it.

        Args:
            problem: the step and stage, and what is wrong.
            weights_finite: False if a weight is not finite; skipping does not help then.

        Raises:
            NonFiniteError: the job has to halt.
        """
        state, settings = self.state, self.settings
        state.skips, state.all_skips, state.bad_steps = state.skips + 1, state.all_skips + 1, state.bad_steps + 1
        if settings.on_nonfinite == "halt":
            raise NonFiniteError(
                f"{problem}. No weight was changed.\n  fix: look at the data and the learning rate of "
                'this step; health.on_nonfinite = "skip" skips such steps'
            )
        if state.skips <= MAX_SKIPS and weights_finite:
            return f"{problem}. Skipped: no weight was changed ({state.skips} of at most {MAX_SKIPS} in a row)", None
        # If no healthy step followed the last rollback, its checkpoint does not help.
        too_new = state.rolled_back_to if state.rolled_back_to >= 0 and not state.healthy_steps else None
        checkpoint = find_checkpoint(too_new) if state.rollbacks < settings.max_rollbacks else None
        if checkpoint is None:
            allowed = state.rollbacks < settings.max_rollbacks
            why = "there is no checkpoint to load" if allowed else f"health.max_rollbacks = {settings.max_rollbacks}"
            raise NonFiniteError(
                f"{problem}. It follows {state.skips - 1} skipped steps in a row and {state.rollbacks} rollbacks, and "
                f"{why}. No weight was changed.\n  fix: resume from the last checkpoint with a lower learning rate"
            )
        path, saved = checkpoint
        state.rollbacks += 1
        state.skips, state.bad_steps, state.healthy_steps, state.rolled_back_to = 0, 0, 0, saved.step
        done = f"ROLLED BACK to {path}, and the text since is skipped ({state.rollbacks} rollbacks so far)"
        return f"{problem}. {done}", checkpoint
