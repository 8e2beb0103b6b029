"""When a run is saved, apart from the ends of stages."""

import time

from torchtitan_cp.config.sections import Checkpoint


class SaveSchedule:
    """Every so many steps, and every so many minutes since the last save.

    Args:
        settings: [checkpoint].
    """

    def __init__(self, settings: Checkpoint) -> None:
        self.settings = settings
        self.saved()

    def saved(self) -> None:
        """A save begins now, or was tried in vain: the next comes an interval later."""
        self.last_seconds = time.monotonic()

    def time_is_up(self) -> bool:
        """Whether the minutes have passed on this rank's clock. Ranks may differ: they must agree before they save."""
        minutes = self.settings.interval_minutes
        return minutes > 0 and time.monotonic() - self.last_seconds >= 60 * minutes

    def step_is_due(self, step: int) -> bool:
        """Whether an interval of steps ends with this one."""
        return step % self.settings.interval == 0
