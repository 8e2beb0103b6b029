"""What a person sees of a run: a live bar on a terminal, a line now and then elsewhere, a table at each stage's end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from torchtitan_cp.metrics.record import StepRecord

PLAIN_LINE_SECONDS = 30.0  # a log is read later, and metrics.jsonl has every step


@dataclass(frozen=True)
class StageSummary:
    """A row of the table of stages; None is what was not measured, or of which no step was finite.

    Attributes:
        far_loss: at the far end of the context, held out where an evaluation was made, else in training.
    """

    name: str
    seq_len: int
    cp: int
    steps: int
    first_loss: float | None
    last_loss: float | None
    far_loss: float | None
    passkey_accuracy: float | None
    tokens_per_second: float | None
    mfu: float | None
    peak_memory_bytes: int | None


class Console:
    """Prints on rank 0, and nothing anywhere else.

    Args:
        total_steps: optimizer steps of the whole run; done: those already taken.
        speaks: whether this rank prints.
    """

    def __init__(self, total_steps: int, done: int, *, speaks: bool) -> None:
        self.total_steps, self.speaks = total_steps, speaks
        self.terminal = Terminal(quiet=not speaks, highlight=False)
        self.live = speaks and self.terminal.is_terminal
        self.begun, self.done_before, self.last_line = time.monotonic(), done, 0.0
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.terminal,
            disable=not self.live,
        )
        self.task = self.bar.add_task("starting", total=total_steps, completed=done, numbers="")

    def start(self) -> None:
        """Show the bar."""
        self.bar.start()

    def say(self, text: str) -> None:
        """Print lines of text above the bar."""
        self.terminal.print(text, markup=False, soft_wrap=True)

    def step(self, record: StepRecord, total_steps: int) -> None:
        """Show a step: on the bar, or as a line unless the last one was printed a moment ago.

        Args:
            total_steps: of the whole run, as far as is known now.
        """
        self.total_steps = total_steps
        loss = "left out" if record.loss is None else f"{record.loss:.4f}"
        numbers = f"loss {loss}  {record.tokens_per_second:,.0f} tok/s  mfu {record.mfu:.1%}"
        stage = f"stage {record.stage_index + 1} ({record.stage}, cp {record.cp})"
        if self.live:
            self.bar.update(self.task, completed=record.step, total=total_steps, description=stage, numbers=numbers)
            return
        last = record.step == self.total_steps
        if time.monotonic() - self.last_line >= PLAIN_LINE_SECONDS or last:
            self.last_line = time.monotonic()
            left = _clock(self._seconds_left(record.step))
            self.say(f"step {record.step}/{self.total_steps}  {stage}  {numbers}  lr {record.lr:.2e}  {left} left")

    def _seconds_left(self, step: int) -> float:
        taken = max(1, step - self.done_before)
        return (time.monotonic() - self.begun) / taken * (self.total_steps - step)

    def table(self, stages: Sequence[StageSummary]) -> None:
        """Print a row for each stage."""
        table = Table(
            title="What was trained: first and last loss, loss at the far end",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=0,
            pad_edge=False,
        )
        for header in ("stage", "seq_len", "cp", "steps", "first", "last", "far", "passkey", "tok/s", "mfu", "GiB"):
            table.add_column(header, justify="left" if header == "stage" else "right")
        for stage in stages:
            losses = (_number(loss, ".4f") for loss in (stage.first_loss, stage.last_loss, stage.far_loss))
            peak = None if stage.peak_memory_bytes is None else stage.peak_memory_bytes / 2**30
            table.add_row(
                stage.name,
                f"{stage.seq_len:,}",
                str(stage.cp),
                f"{stage.steps:,}",
                *losses,
                _number(stage.passkey_accuracy, ".0%"),
                _number(stage.tokens_per_second, ",.0f"),
                _number(stage.mfu, ".1%"),
                _number(peak, ".2f"),
            )
        self.terminal.print(table)

    def stop(self) -> None:
        """Take the bar away."""
        self.bar.stop()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
