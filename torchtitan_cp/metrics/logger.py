"""Hands what is recorded of a run to every sink."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, Protocol

import numpy as np

from torchtitan_cp.config.json_types import Json
from torchtitan_cp.config.run import Metrics
from torchtitan_cp.metrics.console_sink import ConsoleSink
from torchtitan_cp.metrics.jsonl_sink import METRICS_FILE, JsonLinesSink
from torchtitan_cp.metrics.step_record import StepRecord
from torchtitan_cp.metrics.tensorboard_sink import TensorBoardSink
from torchtitan_cp.metrics.wandb_sink import WandbSink

logger = logging.getLogger(__name__)


P = ParamSpec("P")


class Sink(Protocol):
    """Takes what it has methods for; see docs/how_to_add.md."""

    @property
    def name(self) -> str: ...


class MetricsLogger:
    """Hands records, numbers, images and texts to the console and, on rank 0, the other sinks.

    A sink has a `name` for messages, and one method for each kind of thing it takes: `step(record)`,
    `evaluation(record)`, `scalars(values, step)`, `image(tag, pixels, step)`, `text(tag, text, step)`, `close()`. Its
    `errors` are the exception types, besides OSError, that these methods raise.

    Args:
        total_steps: optimizer steps of the whole run; done: those already taken.
        enabled: whether this rank prints, as rank 0 does.
    """

    def __init__(self, settings: Metrics, total_steps: int, done: int, *, enabled: bool) -> None:
        self.settings, self.console = settings, ConsoleSink(total_steps, done, enabled=enabled)
        self.sinks: list[Sink] = [self.console]

    def open_files(self, folder: Path, after_step: int, *, evaluates_again: bool = False) -> None:
        """Open the sinks that [metrics] asks for. Rank 0 calls this.

        Args:
            folder: where sinks write; its name is the run's on Weights & Biases.
            after_step: what was recorded of later steps is dropped, because a resumed run repeats them.
            evaluates_again: so is the evaluation of that step.

        Raises:
            UserError: a package is missing, or Weights & Biases opens no run.
            OSError: a file cannot be written.
        """
        self.sinks.append(JsonLinesSink(folder, after_step, evaluates_again=evaluates_again))
        if self.settings.tensorboard:
            self.sinks.append(TensorBoardSink(folder, after_step))
        if self.settings.wandb:
            self.sinks.append(WandbSink(self.settings.wandb, folder))

    def step(self, record: StepRecord, total_steps: int) -> None:
        """Record an optimizer step.

        Args:
            total_steps: of the whole run, as currently planned; a gate may end a stage earlier.
        """
        self.console.total_steps = total_steps
        self._send("step", record)
        if record.step % self.settings.interval == 0:
            self.scalars(record.scalars(), record.step)

    def evaluation(self, record: Mapping[str, Json], scalars: Mapping[str, float], step: int) -> None:
        """Record the result of an evaluation: plain JSON, and the numbers to plot by tag."""
        self._send("evaluation", record)
        self.scalars(scalars, step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers by tag."""
        self._send("scalars", values, step)

    def image(
        self, tag: str, step: int, draw: Callable[P, np.ndarray], *arguments: P.args, **options: P.kwargs
    ) -> None:
        """Draw an image, `[height, width, 3]` uint8, with a function of `figures`, if a sink takes images."""
        if any(hasattr(sink, "image") for sink in self.sinks):
            self._send("image", tag, draw(*arguments, **options), step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Record a text in Markdown; the console does not print it."""
        self._send("text", tag, text, step)

    def say(self, text: str, *, tag: str = "", step: int = 0) -> None:
        """Print a text, and record it if it has a tag."""
        self.console.print(text)
        if tag:
            self.text(tag, text, step)

    def warn(self, text: str, step: int) -> None:
        """Log a warning about the run's health on rank 0, and record it."""
        if self.console.enabled:
            logger.warning(text)
        self.text("health", text, step)

    def close(self) -> None:
        """Close every sink."""
        self._send("close")

    def _send(self, method: str, *arguments: object) -> None:
        """Call a method of the sinks that have it; one that fails is removed: its file may end in half a record."""
        for sink in [sink for sink in self.sinks if hasattr(sink, method)]:
            try:
                getattr(sink, method)(*arguments)
            except (OSError, *getattr(sink, "errors", ())) as error:
                self.sinks.remove(sink)
                logger.error("%s is off until the run's next start: %s. %s goes on", sink.name, error, METRICS_FILE)
