"""When a checkpoint is due, apart from the ends of stages."""

import time

from torchtitan_cp.config.sections import Checkpoint


class SaveSchedule:
    """Every `interval` steps, and every `interval_minutes` since the last save.

    Args:
        settings: [checkpoint].
    """

    def __init__(self, settings: Checkpoint) -> None:
        self.settings = settings
        self.saved()

    def saved(self) -> None:
        """Start the minutes again: a save starts now, or was refused."""
        self.last_seconds = time.monotonic()

    def time_is_up(self) -> bool:
        """Whether the minutes have passed on this rank's clock. Clocks differ: ranks must agree before they save."""
        minutes = self.settings.interval_minutes
        return minutes > 0 and time.monotonic() - self.last_seconds >= 60 * minutes

    def step_is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return step % self.settings.interval == 0
