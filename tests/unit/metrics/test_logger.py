"""Where a run's numbers go: metrics.jsonl, evaluation.jsonl, TensorBoard, the console."""

import errno
import io
import json
import math
import os
import re
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2

from torchtitan_cp.config import UserError
from torchtitan_cp.config.sections import Metrics
from torchtitan_cp.evaluation.result import EvaluationResult, Retrieval
from torchtitan_cp.metrics.console_sink import COLUMNS, ConsoleSink
from torchtitan_cp.metrics.jsonl_sink import JsonLinesSink, read_evaluations
from torchtitan_cp.metrics.logger import MetricsLogger
from torchtitan_cp.metrics.step_record import StepRecord
from torchtitan_cp.metrics.tensorboard_sink import LAYOUT, TensorBoardSink


def record(step: int, loss: float | None = 2.0) -> StepRecord:
    return StepRecord(
        step=step,
        stage="4K",
        stage_index=0,
        seq_len=4096,
        cp=2,
        tokens=step * 8192,
        loss=loss,
        grad_norm=loss,
        lr=1e-3,
        tokens_per_second=5000.0,
        tokens_per_second_per_rank=2500.0,
        mfu=0.4,
        peak_memory_bytes=10**9,
        data_wait_seconds=0.01,
        step_seconds=1.6,
        pipeline_idle=0.25,
        seconds={"forward": 0.5},
        largest_logit=9.0,
        block_grad_norm={"0": 1.0, "1": 2.0},
        block_output={"0": 3.0},
        loss_by_position={"0": 3.0, "16": 2.0},
        loss_by_document_position={"0": 3.0},
        loss_by_source={"books": 2.0},
        mfu_mask=0.3,
        cp_imbalance=1.1,
        cp_keys_sent=0.4,
        unlabelled=0.01,
        memory_bytes={"weights": 10**6},
        expert_load={"1": 2.5},
        router_entropy={"1": 0.6},
        idle_experts=0.25,
        skipped=loss is None,
    )


# Dashboards of users rely on these.
TAGS = {
    *("train/loss", "train/perplexity", "train/grad_norm", "train/lr"),
    *("health/skipped", "health/spikes", "health/skipped_steps", "health/rollbacks"),
    *("health/largest_logit", "grad_norm_by_block/0", "grad_norm_by_block/1", "largest_output_by_block/0"),
    *("speed/tokens_per_second", "speed/tokens_per_second_per_rank", "speed/mfu", "speed/mfu_mask"),
    *("speed/step_seconds", "speed/data_wait_seconds", "speed/pipeline_idle"),
    *("speed/cp_imbalance", "speed/cp_keys_sent"),
    *("loss_by_position/0", "loss_by_position/16", "loss_by_document_position/0", "loss_by_source/books"),
    *("seconds/forward", "data/unlabelled_share", "memory/weights", "memory/peak_bytes"),
    *("experts/largest_load/1", "experts/router_entropy/1", "experts/idle_share"),
    *("curriculum/stage", "curriculum/seq_len", "curriculum/cp", "curriculum/tokens_seen"),
}
FOUND = EvaluationResult(
    2.0,
    3.0,
    {"books": 2.0},
    [0, 16],
    [3.0, 2.0],
    context_gain=0.1,
    turn_losses=[2.0, math.nan, 1.5],
    short_loss_rise=0.0,
    retrieval={"passkey": Retrieval(np.ones((1, 1)), (64,), (0.0,))},
)


def test_each_step_is_a_line_at_full_precision_and_a_point_for_every_tag(tmp_path: Path) -> None:
    logger = MetricsLogger(Metrics(interval=2), 4, 0, enabled=False)
    logger.open_files(tmp_path, after_step=0)
    losses = [1 / 3, 2 / 3, None, 0.1]
    for step, loss in enumerate(losses, start=1):
        logger.step(record(step, loss), 4)
    logger.say("4K begins", tag="stage", step=1)
    logger.warn("the loss is 9", 4)
    logger.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == losses
    assert [line["skipped"] for line in lines] == [False, False, True, False]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == TAGS
    assert [point.step for point in board.Scalars("train/loss")] == [2, 4]
    [file] = (tmp_path / "tensorboard").iterdir()
    assert [event.step for event in EventFileLoader(str(file)).Load()].count(2) == 1  # of all its numbers, not of each
    texts = [board.Tensors(f"{tag}/text_summary")[0] for tag in ("stage", "health")]
    assert [(text.step, *text.tensor_proto.string_val) for text in texts] == [(1, b"4K begins"), (4, b"the loss is 9")]


def test_tensorboard_has_a_layout_that_begins_with_what_matters(tmp_path: Path) -> None:
    for after_step in (0, 2):  # of a resumed run too
        TensorBoardSink(tmp_path, after_step).close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    event = board.Tensors("custom_scalars__config__")[-1]
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [group.title for group in layout.category] == ["Loss", "Validation", "Throughput", "Memory", "Curriculum"]
    patterns = [pattern for group in layout.category for chart in group.chart for pattern in chart.multiline.tag]
    known = TAGS | {f"validation/{name}" for name in FOUND.scalars(64)} | {"gate/of_max_tokens"}
    assert [pattern for pattern in patterns if not any(re.match(pattern, tag) for tag in known)] == []
    assert len(patterns) == sum(map(len, LAYOUT.values()))


def test_a_sink_whose_disk_is_full_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        name = "TensorBoard"

        def step(self, record: StepRecord) -> None:
            raise OSError(28, "No space left on device")

    class Kept:
        steps = 0

        def step(self, record: StepRecord) -> None:
            self.steps += 1

    logger, kept = MetricsLogger(Metrics(), 4, 0, enabled=False), Kept()
    logger.sinks += [Full(), kept]
    logger.step(record(1), 4)
    logger.step(record(2), 4)
    assert kept.steps == 2
    assert caplog.text.count("TensorBoard is off until the run's next start") == 1


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Writing more to a file fails with an OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_the_disk_is_full_tensorboard_is_off_after_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = MetricsLogger(Metrics(interval=1), 4, 0, enabled=False)
    logger.open_files(tmp_path, after_step=0)
    logger.step(record(1), 4)
    [file] = (tmp_path / "tensorboard").iterdir()
    with no_file_beyond(file.stat().st_size + 100):
        for step in (2, 3):
            logger.scalars({f"tag/{index}": 1.0 for index in range(100)}, step)
            logger.text("stage", "a text", step)
    logger.step(record(4), 4)
    logger.close()
    off = "TensorBoard is off until the run's next start: [Errno 27] File too large. metrics.jsonl goes on"
    assert [entry.getMessage() for entry in caplog.records] == [off]
    assert capfd.readouterr().err == ""
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [1]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 4]
    TensorBoardSink(tmp_path, after_step=4).scalars({"train/loss": 5.0}, 5)
    board.Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [1, 5], "the next start writes a file of its own"


LINES = [json.dumps({"step": step, "loss": step / 3}) for step in (1, 2, 3)]


def test_a_resumed_run_forgets_lost_steps_and_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(LINES) + '\n{"step": 4, "lo')
    JsonLinesSink(tmp_path, after_step=2).close()
    assert path.read_text().splitlines() == LINES[:2]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["evaluation.jsonl", "metrics.jsonl"]


def test_bytes_that_a_power_cut_left_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINES[0].encode() + b"\n\x00\xff\xfe")
    JsonLinesSink(tmp_path, after_step=2).close()
    assert path.read_text().splitlines() == LINES[:1]


def test_forgetting_needs_no_room_on_the_disk_nor_memory_for_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in range(20_000)]
    path.write_text("".join(lines))
    tracemalloc.start()
    with no_file_beyond(100_000):
        JsonLinesSink(tmp_path, after_step=19_000).close()
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.read_text() == "".join(lines[:19_001])
    assert most_bytes < path.stat().st_size / 2


def test_forgetting_drops_unreadable_and_later_lines_between_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = [json.dumps({"step": step}) + "\n" for step in (1, 22, 333)]
    path.write_text(kept[0] + "\0\0\0\n" + kept[1] + '{"step": 4444}\n' + kept[2] + '{"step": 33')
    JsonLinesSink(tmp_path, after_step=333).close()
    assert path.read_text() == "".join(kept)


def test_a_file_that_cannot_be_opened_ends_the_start_in_a_message(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    with pytest.raises(UserError) as raised:
        JsonLinesSink(tmp_path, after_step=0)
    assert raised.value.message == f"{path} cannot be written: Is a directory; it is unchanged"
    assert "free some space" in raised.value.fix


def test_lines_that_find_no_room_are_written_when_there_is_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = JsonLinesSink(tmp_path, after_step=0)
    with no_file_beyond(1000):
        for step in range(1, 5):
            sink.step(record(step))
    sink.step(record(5))
    with no_file_beyond(1000):
        sink.step(record(6))
    sink.close()
    sink = JsonLinesSink(tmp_path, after_step=6)
    with no_file_beyond(1000):
        sink.step(record(7))
        sink.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert caplog.text.count("lines are kept until there is room") == 3
    assert "metrics.jsonl: the last 1 lines are lost" in caplog.text


def test_a_resumed_run_knows_the_evaluations_of_the_steps_before_it(tmp_path: Path) -> None:
    for after_step, known in ((0, []), (1, [1])):
        sink = JsonLinesSink(tmp_path, after_step)
        assert [found["step"] for found in read_evaluations(tmp_path)] == known
        for step in (after_step + 1, after_step + 2):
            sink.evaluation({"step": step, "loss": 2.5})
        sink.close()


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


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logger = MetricsLogger(Metrics(), 100, 0, enabled=False)
    logger.console.bar.start()
    logger.say("hello")
    logger.step(record(1), 100)
    logger.console.print_stages([])
    logger.close()
    assert capsys.readouterr().out == ""


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
