"""TensorBoard: its layout, and a disk that is full."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from tests.support.step_records import no_file_beyond, record
from torchtitan_cp.config.run import Metrics
from torchtitan_cp.metrics.logger import MetricsLogger
from torchtitan_cp.metrics.tensorboard_sink import TensorBoardSink


def board_of(folder: Path, run: str = "") -> EventAccumulator:
    board = EventAccumulator(str(folder / "tensorboard" / run))
    board.Reload()
    return board


def titles(folder: Path) -> list[str]:
    """Of the charts that the newest layout has."""
    board = board_of(folder)
    if "custom_scalars__config__" not in board.Tags()["tensors"]:
        return []
    event = board.Tensors("custom_scalars__config__")[-1]
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    return [chart.title for group in layout.category for chart in group.chart]


def test_a_chart_appears_with_its_first_value_and_a_later_start_still_has_it(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, 0)
    assert titles(tmp_path) == []
    sink.scalars({"train/loss": 2.0, "grad_norm_by_block/0": 1.0}, 1)
    assert titles(tmp_path) == ["training loss"], "no chart shows the other"
    sink.scalars({"validation/loss_by_source/books": 3.0, "validation/loss": 3.0}, 2)
    both = ["held-out loss, by source", "training loss", "loss, all sources"]
    assert titles(tmp_path) == both
    sink.close()
    later = TensorBoardSink(tmp_path, after_step=1)
    assert titles(tmp_path) == both
    later.scalars({"train/grad_norm": 2.0}, 2)
    assert titles(tmp_path) == [*both[:2], "gradient norm", both[2]]
    later.close()
    from_the_beginning = TensorBoardSink(tmp_path, after_step=0)
    from_the_beginning.scalars({"train/loss": 2.0}, 1)
    from_the_beginning.close()
    assert titles(tmp_path) == ["training loss"], "what there was is hidden"


def test_a_run_that_begins_anew_hides_the_evaluation_before_the_first_step_too(tmp_path: Path) -> None:
    for loss in (3.0, 4.0):
        sink = TensorBoardSink(tmp_path, after_step=0)
        sink.scalars({"validation/loss": loss}, 0)
        sink.close()
    assert [(point.step, point.value) for point in board_of(tmp_path).Scalars("validation/loss")] == [(0, 4.0)]


def test_lines_of_one_chart_are_runs_of_their_own_that_a_resumed_run_goes_on_with(tmp_path: Path) -> None:
    for after_step, value in ((0, 0.25), (2, 0.75)):
        sink = TensorBoardSink(tmp_path, after_step)
        for step in (after_step + 1, after_step + 2, after_step + 3):
            sink.scalars({"validation/passkey_by_length/4K": value, "train/loss": 2.0}, step)
        sink.close()
    points = board_of(tmp_path, "prompts-4K").Scalars("validation/passkey_by_length")
    assert [(point.step, point.value) for point in points] == [
        *((step, 0.25) for step in (1, 2)),
        *((step, 0.75) for step in (3, 4, 5)),
    ]
    assert board_of(tmp_path).Tags()["scalars"] == ["train/loss"]


def test_where_the_disk_is_full_tensorboard_is_off_after_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = MetricsLogger(Metrics(interval=1), 4, 0, enabled=False)
    logger.open_files(tmp_path, after_step=0)
    logger.step(record(1), 4)
    [file] = (tmp_path / "tensorboard").glob("events.*")
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
