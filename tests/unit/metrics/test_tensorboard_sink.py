"""TensorBoard: its layout, and a disk that is full."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from tests.support.step_records import TAGS, no_file_beyond, record
from torchtitan_cp.config.run import Metrics
from torchtitan_cp.evaluation.result import EvaluationResult, Retrieval
from torchtitan_cp.metrics.logger import MetricsLogger
from torchtitan_cp.metrics.tensorboard_sink import LAYOUT, TensorBoardSink

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
