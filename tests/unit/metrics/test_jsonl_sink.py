"""metrics.jsonl and evaluation.jsonl: what a resumed run keeps of them, and a disk that is full."""

import json
import tracemalloc
from pathlib import Path

import pytest

from tests.support.step_records import no_file_beyond, record
from torchtitan_cp.config import UserError
from torchtitan_cp.metrics.jsonl_sink import JsonLinesSink, read_evaluations

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
    for after_step, again, known in ((0, False, []), (1, False, [1]), (3, True, [1, 2]), (4, False, [1, 2, 4])):
        sink = JsonLinesSink(tmp_path, after_step, evaluates_again=again)
        assert [found["step"] for found in read_evaluations(tmp_path)] == known
        for step in (after_step + 1, after_step + 2):
            sink.evaluation({"step": step, "loss": 2.5})
        sink.close()
