"""Where a run's numbers go: each step to every sink, on rank 0 alone, and past a sink that fails."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tests.support.step_records import TAGS, record
from torchtitan_cp.config.run import Metrics
from torchtitan_cp.metrics.logger import MetricsLogger
from torchtitan_cp.metrics.step_record import StepRecord


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
    [file] = (tmp_path / "tensorboard").glob("events.*")
    assert [event.step for event in EventFileLoader(str(file)).Load()].count(2) == 1  # of all its numbers, not of each
    texts = [board.Tensors(f"{tag}/text_summary")[0] for tag in ("stage", "health")]
    assert [(text.step, *text.tensor_proto.string_val) for text in texts] == [(1, b"4K begins"), (4, b"the loss is 9")]


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


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logger = MetricsLogger(Metrics(), 100, 0, enabled=False)
    logger.console.bar.start()
    logger.say("hello")
    logger.step(record(1), 100)
    logger.console.print_stages([])
    logger.close()
    assert capsys.readouterr().out == ""
