"""Numbers that a person or a script reads."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console as Terminal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_cp.metrics import Console, MetricsWriter, StepRecord, find_peak, flops_per_token
from torchtitan_cp.metrics.console import StageSummary
from torchtitan_cp.metrics.writer import TAGS


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
        loss_by_position={"0": 3.0, "16": 2.0},
        skipped=loss is None,
    )


def test_flops_count_six_a_weight_and_half_the_square_of_attention() -> None:
    assert flops_per_token(10**6, [0, 0], 4, 64, 0) == 6e6
    full_mask = 12 * 2 * 4 * 64 * 4096
    assert flops_per_token(0, [0, 0], 4, 64, 4096) == full_mask / 2
    seen = sum(min(row + 1, 100) for row in range(4096)) / 4096
    assert flops_per_token(0, [100], 4, 64, 4096) == pytest.approx(12 * 4 * 64 * seen, rel=2e-2)


def test_peak_is_what_was_stated_else_the_table_else_measured() -> None:
    cpu = torch.device("cpu")
    assert find_peak(cpu, "cpu", torch.float32, 2.5).flops_per_second == 2.5e12
    table = find_peak(cpu, "NVIDIA H200", torch.bfloat16, 0)
    assert table.flops_per_second == 989e12
    assert "data sheet of H200" in table.source
    measured = find_peak(cpu, "cpu, 1 thread a rank", torch.float32, 0)
    assert measured.flops_per_second > 1e9
    assert "measured by a torch.float32 matmul" in measured.source


def test_each_step_is_a_line_at_full_precision_and_a_point_for_every_tag(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, after_step=0, tensorboard=True, interval=2)
    losses = [1 / 3, 2 / 3, None, 0.1]
    for step, loss in enumerate(losses, start=1):
        writer.step(record(step, loss))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == losses
    assert [line["skipped"] for line in lines] == [False, False, True, False]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    single = {tag for field, tag in TAGS.items() if isinstance(getattr(record(1), field), (int, float))}
    several = {"seconds/forward", "grad_norm_by_block/0", "grad_norm_by_block/1", "loss_by_position/0"}
    assert set(board.Tags()["scalars"]) == single | several | {"loss_by_position/16"}
    assert [point.step for point in board.Scalars("train/loss")] == [2, 4]


def test_a_resumed_run_forgets_lost_steps_and_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": step / 3}) for step in (1, 2, 3)]
    path.write_text("\n".join(lines) + '\n{"step": 4, "lo')
    MetricsWriter(tmp_path, after_step=2, tensorboard=False, interval=1).close()
    assert path.read_text().splitlines() == lines[:2]


def printed(console: Console, width: int = 120) -> io.StringIO:
    text = io.StringIO()
    console.terminal = Terminal(file=text, width=width, highlight=False)
    return text


def test_where_there_is_no_terminal_a_step_is_a_plain_line() -> None:
    console = Console(100, 0, speaks=True)
    console.live = False
    text = printed(console)
    console.step(record(1), 100)
    console.step(record(2, None), 100)
    console.step(record(100, None), 100)
    first, last = text.getvalue().splitlines()
    assert first.startswith("step 1/100  stage 1 (4K, cp 2)  loss 2.0000  5,000 tok/s  mfu 40.0%")
    assert "left" in first
    assert last.startswith("step 100/100")
    assert "loss left out" in last


def test_the_table_shows_each_stage_on_a_terminal_of_80_columns() -> None:
    console = Console(100, 0, speaks=True)
    text = printed(console, 80)
    console.table(
        [
            StageSummary("1M", 2**20, 64, 12_000, 8.25, 4.125, 3.875, 0.95, 1_234_567.0, 0.25, 133 * 2**30),
            StageSummary("8K", 8192, 2, 40, None, None, None, None, None, None, None),
        ]
    )
    rows = [line.split() for line in text.getvalue().splitlines() if "1,048,576" in line or "8,192" in line]
    measured = ["8.2500", "4.1250", "3.8750", "95%", "1,234,567", "25.0%", "133.00"]
    assert rows == [["1M", "1,048,576", "64", "12,000", *measured], ["8K", "8,192", "2", "40", *["-"] * 7]]


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(100, 0, speaks=False)
    console.start()
    console.say("hello")
    console.step(record(1), 100)
    console.table([])
    console.stop()
    assert capsys.readouterr().out == ""


def test_a_resumed_run_knows_the_evaluations_of_the_steps_before_it(tmp_path: Path) -> None:
    for after_step, known in ((0, []), (1, [1])):
        writer = MetricsWriter(tmp_path, after_step=after_step, tensorboard=False, interval=1)
        assert [found["step"] for found in writer.earlier_evaluations()] == known
        for step in (after_step + 1, after_step + 2):
            writer.evaluation({"step": step, "loss": 2.5})
        writer.close()
