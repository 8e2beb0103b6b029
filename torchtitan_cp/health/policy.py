"""What follows when a step was not finite."""

from torchtitan_cp.config.sections import Health


class NonFiniteError(RuntimeError):
    """A step had a number that is not finite, and the job is to halt."""


class Policy:
    """Counts skipped steps and says when it is enough.

    Args:
        settings: [health].
        consecutive_skips: carried over from a checkpoint.
    """

    def __init__(self, settings: Health, consecutive_skips: int = 0) -> None:
        self.settings, self.consecutive_skips = settings, consecutive_skips

    def finite(self) -> None:
        """A good step ends a row of skips."""
        self.consecutive_skips = 0

    def trip(self, where: str, findings: tuple[str, ...]) -> str:
        """A step was not finite. Returns what to log when it is skipped.

        Args:
            where: the step and stage.

        Raises:
            NonFiniteError: the policy is to halt, or too many steps in a row were skipped.
        """
        self.consecutive_skips += 1
        what = f"{where} is not finite: " + "; ".join(findings)
        limit = self.settings.max_consecutive_skips
        if self.settings.on_nonfinite == "halt":
            raise NonFiniteError(
                f"{what}. No weight was changed.\n  fix: look at the data and the learning rate of "
                'this step; health.on_nonfinite = "skip" passes over such steps'
            )
        if self.consecutive_skips > limit:
            raise NonFiniteError(
                f"{what}. Skipped {limit} steps in a row before it (health.max_consecutive_skips). "
                "No weight was changed.\n  fix: resume from the last checkpoint with a lower "
                "learning rate"
            )
        return f"{what}. Skipped: no weight was changed ({self.consecutive_skips} of at most {limit} in a row)"
