"""Losses by position, document and source against loops, and the same on any layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import RankPool
from tests.runs import train, write_run
from torchtitan_cp.metrics.positions import bin_starts
from torchtitan_cp.metrics.tally import LossTally


def bin_of(position: int) -> str:
    return str(0 if position < 16 else 2 ** (position.bit_length() - 1))


def test_bins_are_powers_of_two_from_16() -> None:
    assert bin_starts(100) == [0, 16, 32, 64]
    assert bin_starts(64) == [0, 16, 32]
    assert bin_starts(1) == [0]


def test_each_token_counts_once_in_its_bins_and_its_source() -> None:
    generator = np.random.default_rng()
    tally = LossTally(100, ["a", "b", "never"], torch.device("cpu"))
    want: dict[tuple[str, str], list[float]] = {}
    for sources in (("a", "b"), ("b", "b")):
        losses = generator.random((2, 50)).astype(np.float32)
        counted, within = generator.random((2, 50)) < 0.8, generator.integers(0, 100, (2, 50))
        positions = generator.permutation(100)[:50]
        tally.add(*map(torch.from_numpy, (losses * counted, counted, positions, within)), sources)
        for row, column in np.argwhere(counted):
            for kind, key in (
                ("position", bin_of(int(positions[column]))),
                ("document", bin_of(int(within[row, column]))),
                ("source", sources[row]),
            ):
                want.setdefault((kind, key), []).append(float(losses[row, column]))
    found = tally.details()
    got = {("position", key): loss for key, loss in found.by_position.items()}
    got |= {("document", key): loss for key, loss in found.by_document_position.items()}
    got |= {("source", key): loss for key, loss in found.by_source.items()}
    assert got == pytest.approx({key: np.mean(losses) for key, losses in want.items()}, rel=1e-6)
    assert found.tokens == sum(len(losses) for (kind, _), losses in want.items() if kind == "source")


PACKED = (
    "--data.document_mask=true",
    "--data.packing=best_fit",
    "--data.max_document=60",
    "--metrics.interval=2",
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


@pytest.mark.parametrize("layout", LAYOUTS)
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
    memory = looked_at["memory_bytes"]
    assert memory["optimizer"] == pytest.approx(2 * memory["weights"], rel=0.01)
    assert sum(memory.values()) == pytest.approx(looked_at["peak_memory_bytes"], rel=0.2)
    json.dumps(alone)
