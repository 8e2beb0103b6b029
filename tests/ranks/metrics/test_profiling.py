"""Traced steps: what is written."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rank_pool import RankPool
from tests.support.runs import train, write_run


def test_chosen_steps_on_chosen_ranks_leave_a_trace_and_a_table(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_run(tmp_path)
    chosen = ["--profiling.steps=[2,4]", "--profiling.ranks=[1]", "--parallel.cp=2", "--curriculum.stages[0].steps=4"]
    lines = ranks(2)(train, path, *chosen)[0]
    folder = tmp_path / "run" / "profile"
    assert sorted(file.name for file in folder.iterdir()) == [
        f"step-{step}-rank-1.{ending}" for step in (2, 4) for ending in ("json.gz", "txt")
    ]
    events = json.loads(gzip.decompress((folder / "step-2-rank-1.json.gz").read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    head, *rows = (folder / "step-4-rank-1.txt").read_text().splitlines()
    assert head.startswith("step 4, rank 1: ")
    parts = {row[: row.index("  ", 2)].strip(): float(row.split()[-3]) for row in rows}
    assert parts["compute"] > 0
    assert parts["CP exchange, exposed"] > 0
    hidden = parts.pop("CP exchange, hidden (at most)")
    assert hidden >= 0
    assert sum(parts.values()) == pytest.approx(float(head.split()[-2]), abs=2e-3)
    assert lines[3]["seconds"]["cp_wait"] > 0


def test_a_trace_that_cannot_be_written_ends_no_run(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()
    assert len(ranks(1)(train, path, "--profiling.steps=[2]", "--curriculum.stages[0].steps=3")[0]) == 3
