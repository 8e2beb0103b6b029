"""The console: a progress bar on a terminal, a line every half minute elsewhere, tables of what was learned."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from torchtitan_cp.config.json_types import Json
from torchtitan_cp.config.names import format_tokens
from torchtitan_cp.metrics.step_record import StepRecord

LINE_SECONDS = 30.0  # metrics.jsonl has every step


# The table of stages: header and format of each column.
COLUMNS = {"stage": "", "seq_len": ",", "cp": "", "steps": ",", "first": ".4f", "last": ".4f", "far": ".4f"}
COLUMNS |= {"passkey": ".0%", "tok/s": ",.0f", "mfu": ".1%", "GiB": ".2f"}
# Colors of a cell in the map of keys, from the fraction found on that they are for.
CELL_STYLES = {0.9: "black on green", 0.5: "black on yellow", 0.2: "white on red", 0.0: "white on black"}


class _Terminal(Console):
    """A console that falls silent when its reader has gone, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ConsoleSink:
    """Prints on rank 0 only. If the output goes to a full disk, its lines are lost and training goes on.

    Args:
        total_steps: optimizer steps of the whole run; done: those already taken.
        enabled: whether this rank prints.
    """

    name = "the console"

    def __init__(self, total_steps: int, done: int, *, enabled: bool) -> None:
        self.total_steps, self.enabled = total_steps, enabled
        self.terminal = _Terminal(quiet=not enabled, highlight=False, markup=False)
        self.live = enabled and self.terminal.is_terminal
        self.start_time, self.done_before, self.last_line = time.monotonic(), done, 0.0
        self.numbers = ""  # of the last step, in the bar
        self.bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.terminal,
            disable=not self.live,
        )
        self.task = self.bar.add_task("starting", total=total_steps, completed=done, numbers="")

    def print(self, text: str) -> None:
        """Print lines of text above the bar."""
        with suppress(OSError):
            self.terminal.print(text, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """Move the bar; without a terminal, print a line unless the last one is less than half a minute old."""
        loss = "skipped" if record.loss is None else f"{record.loss:.4f}"
        numbers = f"loss {loss}  {record.tokens_per_second:,.0f} tok/s  mfu {record.mfu:.1%}"
        stage, total = f"stage {record.stage_index + 1} ({record.stage}, cp {record.cp})", self.total_steps
        if self.live:
            self.numbers = numbers
            self.bar.update(self.task, completed=record.step, total=total, description=stage, numbers=numbers)
            return
        now = time.monotonic()
        if now - self.last_line >= LINE_SECONDS or record.step == total:
            self.last_line = now
            step_seconds = (now - self.start_time) / max(1, record.step - self.done_before)
            left = timedelta(seconds=int(step_seconds * (total - record.step)))
            self.print(f"step {record.step}/{total}  {stage}  {numbers}  lr {record.lr:.2e}  {left} left")

    def evaluation_progress(self, measure: str, done: int, count: int) -> None:
        """Show what an evaluation measures, and how many of its sequences are done."""
        numbers = f"evaluating: {measure}, {done} of {count}"
        if self.live:
            self.bar.update(self.task, numbers=numbers)
        elif time.monotonic() - self.last_line >= LINE_SECONDS:
            self.last_line = time.monotonic()
            self.print(numbers)

    def evaluation(self, record: Mapping[str, Json]) -> None:
        """Show the numbers of the last step in the bar again."""
        self.bar.update(self.task, numbers=self.numbers)

    def print_stages(self, rows: Iterable[Mapping[str, str | float | None]]) -> None:
        """Print a table with a row for each stage, with the entries of COLUMNS; None prints as a dash."""
        since = f" that ended since the resume at step {self.done_before}" * bool(self.done_before)
        title = f"Stages{since}: first and last loss, loss at the far end of the context"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
        for header in COLUMNS:
            table.add_column(header, justify="left" if header == "stage" else "right")
        for row in rows:
            cells = [(row[header], form) for header, form in COLUMNS.items()]
            table.add_row(*("-" if value is None else format(value, form) for value, form in cells))
        with suppress(OSError):
            self.terminal.print(table)

    def print_reach(self, stages: Sequence[tuple[str, int]], lengths: Sequence[int], found: np.ndarray) -> None:
        """Print the map of the keys found, colored if colors show: a row for each stage, a column for each length.

        Args:
            stages: name and sequence length of each.
            lengths: tokens of the prompts, rising.
            found: `[stages, lengths]`, fractions; NaN prints as a blank.
        """
        width = max(len("stage"), *(len(name) for name, _ in stages))
        head = " ".join([f"{'stage':<{width}}", *(f"{format_tokens(length):>5} " for length in lengths)])
        lines = [
            Text("Keys found in the upper half of prompts, by length (| ends the stage's length)"),
            Text(head.rstrip(), "bold"),
        ]
        for (name, seq_len), row in zip(stages, found.tolist(), strict=True):
            line = Text(f"{name:<{width}} ")
            last = max((length for length in lengths if length <= seq_len), default=0)
            for length, value in zip(lengths, row, strict=True):
                cell, style = "", ""
                if not math.isnan(value):
                    cell, style = f"{value:.0%}", next(CELL_STYLES[least] for least in CELL_STYLES if value >= least)
                line.append(f"{cell:>5} ", style).append("|" if length == last else " ")
            lines.append(line)
        with suppress(OSError):
            self.terminal.print(*lines, sep="\n", soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        self.bar.stop()
