"""Losses by position, document and source are the same on any layout, and what a record says beside them."""

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.support.deep import deep_rows
from tests.support.rank_pool import RankPool
from tests.support.runs import train, write_run

PACKED = (
    "--data.document_mask=true",
    "--data.packing=best_fit",
    "--data.max_document=60",
    "--metrics.interval=2",
    "--curriculum.stages[0].steps=4",
    "--checkpoint.enable=false",
)
LAYOUTS = {
    "CP 2, zigzag": (2, ["--parallel.cp=2", "--context_parallel.layout=zigzag"]),
    "CP 2, balanced": (2, ["--parallel.cp=2", "--context_parallel.layout=balanced"]),
    "TP 2": (2, ["--parallel.tp=2"]),
    "PP 2": (2, ["--parallel.pp=2"]),
    "FSDP 2 x CP 2, all-to-all": (4, ["--parallel.cp=2", "--context_parallel.strategy=all_to_all"]),
}


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("tally"))


@pytest.fixture(scope="module")
def alone(ranks: Callable[[int], RankPool], run_toml: Path) -> list[dict[str, Any]]:
    return ranks(1)(train, run_toml, *PACKED, f"--job.dump_folder={run_toml.parent / 'alone'}")[0]


@deep_rows("layout", LAYOUTS, default=["PP 2", "FSDP 2 x CP 2, all-to-all"])
def test_any_layout_has_the_losses_of_one_rank_bin_by_bin(
    ranks: Callable[[int], RankPool], run_toml: Path, alone: list[dict[str, Any]], layout: str
) -> None:
    size, overrides = LAYOUTS[layout]
    folder = f"--job.dump_folder={run_toml.parent / layout.replace(' ', '-')}"
    lines = ranks(size)(train, run_toml, folder, *PACKED, *overrides)[0]
    assert [bool(line["loss_by_position"]) for line in lines] == [line["step"] % 2 == 0 for line in lines]
    first, reference = lines[1], alone[1]  # after one update, which differs by rounding
    for name in ("loss_by_position", "loss_by_document_position", "loss_by_source"):
        assert list(first[name]) == list(reference[name])
        assert first[name] == pytest.approx(reference[name], rel=1e-5)
    assert first["unlabelled"] == reference["unlabelled"] > 0
    assert set(reference["loss_by_position"]) == {"0", "16", "32", "64"}
    assert reference["loss_by_document_position"] != reference["loss_by_position"]


def test_a_record_says_where_time_memory_and_work_went(alone: list[dict[str, Any]]) -> None:
    for line in alone:
        parts = line["seconds"]
        assert parts["cp_wait"] == parts["checkpoint"] == 0
        assert 0 < parts["forward"] + parts["backward"] + parts["optimizer"] < line["step_seconds"]
        assert set(line["block_grad_norm"]) == set(line["block_output"]) == {"0", "1"}
        assert sum(norm**2 for norm in line["block_grad_norm"].values()) < line["grad_norm"] ** 2
    looked_at = alone[1]
    assert looked_at["mfu_mask"] < looked_at["mfu"]  # documents see themselves only
    assert looked_at["cp_imbalance"] == 1
    assert looked_at["cp_keys_sent"] == 0
    memory = looked_at["memory_bytes"]
    assert memory["optimizer"] == pytest.approx(2 * memory["weights"], rel=0.01)
    assert sum(memory.values()) == pytest.approx(looked_at["peak_memory_bytes"], rel=0.2)
    json.dumps(alone)


def train_and_listen(path: Path, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """On a rank: the lines of metrics.jsonl, and what was printed."""
    with redirect_stdout(StringIO()) as printed:
        return train(path, *overrides), printed.getvalue()


def test_a_run_with_adapters_records_what_they_take(
    ranks: Callable[[int], RankPool], run_toml: Path, alone: list[dict[str, Any]]
) -> None:
    keys = "--lora.rank=4", "--lora.targets=['layers.1.*w2']", f"--job.dump_folder={run_toml.parent / 'adapters'}"
    lines, printed = ranks(1)(train_and_listen, run_toml, *PACKED, *keys)[0]
    for line in lines:
        assert line["block_grad_norm"]["0"] == 0, "its weights are frozen"
        assert line["block_grad_norm"]["1"] == pytest.approx(line["grad_norm"])
    adapters = 4 * (96 + 48)
    frozen = alone[1]["memory_bytes"]["weights"] / 4
    memory = lines[1]["memory_bytes"]
    assert memory["weights"] == 2 * frozen + 4 * adapters
    assert memory["gradients"] == 4 * adapters
    assert memory["optimizer"] == pytest.approx(2 * 4 * adapters, rel=0.01)
    assert f"parameters (trained: {adapters} more in adapters) on 1 x cpu" in " ".join(printed.split())
