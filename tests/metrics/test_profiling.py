"""Traced steps: what is written, and where the time is said to have gone."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import RankPool
from tests.runs import train, write_run
from torchtitan_cp.metrics.profiling import covered, on_a_gpu


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), max_size=8))
def test_spans_cover_what_any_of_them_covers(spans: list[tuple[int, int]]) -> None:
    assert covered(spans) == len({place for start, stop in spans for place in range(start, stop)})


def test_messages_beside_kernels_are_hidden_and_the_others_exposed() -> None:
    def kernel(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> SimpleNamespace:
        times = SimpleNamespace(start=start * 1e6, end=end * 1e6)
        return SimpleNamespace(name=name, time_range=times, device_type=device, is_user_annotation="::" in name)

    events = [
        kernel("gemm", 0, 4),
        kernel("ncclDevKernel_SendRecv", 2, 7),
        kernel("flash_fwd", 6, 9),
        kernel("aten::mm", 0, 10, "DeviceType.CPU"),
        kernel("FSDP::all_gather", 2, 10),
    ]
    shares = on_a_gpu(events, 10.0, waited=1.5, in_flight=5.0)
    assert shares == pytest.approx(
        {
            "compute": 7.0,
            "messages, hidden": 3.0,
            "messages, exposed": 2.0,
            "of it CP exchange, by the stream's clock": 1.5,
            "nothing on the device": 1.0,
        }
    )


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
