"""A place that metrics go to."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from torchtitan_cp.metrics.step_record import StepRecord


class Sink:
    """Ignores everything; a sink overrides what it records.

    Attributes:
        name: for messages.
        shows_images: whether images are worth drawing for it.
    """

    name: ClassVar[str]
    shows_images: ClassVar[bool] = False

    def step(self, record: StepRecord) -> None:
        """Record an optimizer step."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Record the result of an evaluation, plain JSON with its `step`."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers by tag."""

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        """Record an image, `[height, width, 3]` uint8."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Record a text in Markdown."""

    def close(self) -> None:
        """Write what is left."""
