"""The console: a line or a table, and where nothing can be printed."""

import errno
import io
import os
import re

import numpy as np
import pytest
from rich.console import Console

from tests.support.step_records import record
from torchtitan_cp.metrics.console_sink import COLUMNS, ConsoleSink


def printed(console: ConsoleSink, width: int = 120) -> io.StringIO:
    text = io.StringIO()
    console.terminal = Console(file=text, width=width, highlight=False)
    return text


def test_where_there_is_no_terminal_a_step_is_a_plain_line() -> None:
    console = ConsoleSink(100, 0, enabled=True)
    console.live = False
    text = printed(console)
    console.step(record(1))
    console.step(record(2, None))
    console.step(record(100, None))
    first, last = text.getvalue().splitlines()
    assert first.startswith("step 1/100  stage 1 (4K, cp 2)  loss 2.0000  5,000 tok/s  mfu 40.0%")
    assert "left" in first
    assert last.startswith("step 100/100")
    assert "loss skipped" in last


def test_an_evaluation_shows_how_far_it_is_once_in_half_a_minute_and_on_a_terminal_in_the_bar() -> None:
    console = ConsoleSink(100, 0, enabled=True)
    console.live = False
    text = printed(console)
    for done in (0, 4):
        console.evaluation_progress("passkey at 128 tokens", done, 8)
    assert text.getvalue() == "evaluating: passkey at 128 tokens, 0 of 8\n"
    console.live = True
    console.step(record(1))
    numbers = console.bar.tasks[0].fields["numbers"]
    console.evaluation_progress("context gain", 3, 8)
    assert console.bar.tasks[0].fields["numbers"] == "evaluating: context gain, 3 of 8"
    console.evaluation({})
    assert console.bar.tasks[0].fields["numbers"] == numbers, "as before the evaluation"


def test_the_table_shows_each_stage_on_a_terminal_of_80_columns() -> None:
    console = ConsoleSink(100, 0, enabled=True)
    text = printed(console, 80)
    full = ("1M", 2**20, 64, 12_000, 8.25, 4.125, 3.875, 0.95, 1_234_567.0, 0.25, 133.0)
    console.print_stages(
        [
            dict(zip(COLUMNS, full, strict=True)),
            dict(zip(COLUMNS, ("8K", 8192, 2, 40, *[None] * 7), strict=True)),
        ]
    )
    rows = [line.split() for line in text.getvalue().splitlines() if "1,048,576" in line or "8,192" in line]
    measured = ["8.2500", "4.1250", "3.8750", "95%", "1,234,567", "25.0%", "133.00"]
    assert rows == [["1M", "1,048,576", "64", "12,000", *measured], ["8K", "8,192", "2", "40", *["-"] * 7]]


def test_the_table_of_a_resumed_run_says_which_stages_it_has() -> None:
    for done, title in ((0, "Stages: first"), (75, "Stages that ended since the resume at step 75")):
        console = ConsoleSink(100, done, enabled=True)
        text = printed(console, 80)
        console.print_stages([dict(zip(COLUMNS, ("8K", 8192, 2, 40, *[None] * 7), strict=True))])
        assert text.getvalue().strip().startswith(title)


def test_a_name_in_brackets_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console = ConsoleSink(100, 0, enabled=True)
    row = dict(zip(COLUMNS, ("[long] 8K[/b]", 8192, 2, 40, *[None] * 7), strict=True))
    console.print_stages([row])
    console.terminal.print(console.bar)
    console.bar.update(console.task, description="stage 1 ([long] 8K[/b])")
    console.terminal.print(console.bar)
    printed = capsys.readouterr().out
    assert printed.count("[long] 8K[/b]") == 2


def test_the_map_of_keys_is_plain_without_colors_and_a_bar_ends_the_length_of_each_stage() -> None:
    console = ConsoleSink(100, 0, enabled=True)
    text = printed(console, 80)
    found = np.array([[1.0, 0.95, 0.5, 0.04], [1.0, 0.91, 0.9, np.nan]])
    console.print_reach([("64", 64), ("[long] 128", 128)], [32, 64, 128, 1024], found)
    _, *lines = text.getvalue().splitlines()
    assert [line.rstrip() for line in lines] == [
        "stage         32     64    128     1K",
        "64          100%    95% |  50%     4%",
        "[long] 128  100%    91%    90% |",
    ]


def test_the_map_of_keys_has_a_color_for_each_range_on_a_terminal() -> None:
    console, text = ConsoleSink(100, 0, enabled=True), io.StringIO()
    console.terminal = Console(file=text, width=80, force_terminal=True, color_system="standard")
    console.print_reach([("64", 64)], [16, 32, 64, 128], np.array([[1.0, 0.7, 0.3, 0.0]]))
    cells = re.findall(r"\x1b\[([0-9;]+)m +(\d+%)", text.getvalue())
    assert [number for _, number in cells] == ["100%", "70%", "30%", "0%"]
    assert len({color for color, _ in cells}) == 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_training_goes_on_where_nothing_can_be_printed(number: int) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, os.strerror(number))

    console = ConsoleSink(100, 0, enabled=True)
    console.terminal.file = Broken()
    console.print("a line")
    console.step(record(1))
    console.print_stages([dict.fromkeys(COLUMNS)])
    console.print_reach([("64", 64)], [64], np.ones((1, 1)))
