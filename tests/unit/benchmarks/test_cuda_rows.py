"""Rows that train on one GPU: what they take by the planner, and their corpora."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.budget import one_gpu, predict
from benchmarks.cuda import ROOT
from benchmarks.cuda_rows import ROWS, Row, goal_table, rehearsed, write_corpus
from models import ARCHITECTURES
from tests.support.recipes import walk_on_gpu
from torchtitan_cp.attention.kernels import KERNELS
from torchtitan_cp.config import Config, load_config
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.training.registry import register

GIB = 2**30
BASE = ROOT / "train_configs" / "stdlib_on_cpu.toml"
HOST_GIB = 110  # of a small machine's 128
ALL = [row for rows in ROWS.values() for row in rows if not row.lacking]
NAMES = [row.name for row in ALL]
# A walk takes a minute: the most telling row of each part, and the longest.
WALKED = [*(rows[0] for rows in ROWS.values()), max(ALL, key=lambda row: row.length)]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register(ARCHITECTURES)


def config_of(row: Row) -> Config:
    return load_config(BASE, row.overrides(Path("corpus.jsonl")))


def test_every_row_has_its_own_name() -> None:
    names = [row.name for rows in ROWS.values() for row in rows]
    assert len(set(names)) == len(names)


def test_a_row_says_why_its_kernel_cannot_run() -> None:
    plain = Row("plain", "debug", 512)
    assert plain.lacking is None
    assert replace(plain, kernel="flash").lacking is None
    assert replace(plain, kernel="flash9").lacking == f"there is no kernel flash9; there are {', '.join(KERNELS)}"
    assert replace(plain, kernel="cpu").lacking == "it runs on cpu, not cuda"


def test_the_page_has_the_predictions_of_now_and_no_estimate_where_a_measurement_goes() -> None:
    """`python -m benchmarks.cuda_rows` prints the table."""
    page = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
    assert "\n".join(goal_table()) in page


@pytest.mark.parametrize("row", ALL, ids=NAMES)
def test_a_row_fits_an_h100_and_a_small_host_by_its_plan(row: Row) -> None:
    planned = plan_config(config_of(row), one_gpu("h100-80g"))[0]
    assert planned.stage.micro_batches == 1
    assert planned.memory.total < 72.8 * GIB
    assert sum(planned.host.values()) < HOST_GIB * GIB


@pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("c++") or shutil.which("g++")), reason="needs Linux and a C++ compiler"
)
@pytest.mark.deep
@pytest.mark.xdist_group("jobs/test_page_runs.py")  # early, as it takes minutes
@pytest.mark.parametrize("row", WALKED, ids=lambda row: row.name)
def test_a_row_walked_with_a_gpus_operations_fits_it_as_its_plan_says(row: Row) -> None:
    """Uncompiled, as blocks are walked."""
    options = [*row.overrides(Path("corpus.jsonl")), "--compile.enable=false"]
    walkable = [option for option in options if not option.startswith(("--data.source", "--data.path"))]
    (walked,) = walk_on_gpu(BASE, 1, *walkable)
    planned = plan_config(load_config(BASE, options), one_gpu("h100-80g"))[0]
    assert walked < 72.8 * GIB
    assert walked == pytest.approx(planned.memory.total, rel=0.1)


def test_a_step_of_a_row_takes_its_part_of_a_lease() -> None:
    """With a minute for each row's imports, model and compiler, most rows of a part come before its limit."""
    seconds = {
        part: [
            predict(config_of(row), one_gpu("h100-80g")).seconds * (row.warm_up + row.steps)
            for row in rows
            if row in ALL
        ]
        for part, rows in ROWS.items()
    }
    assert sum(seconds["layers"]) < 60
    assert sum(seconds["long"]) < 130
    assert max(sum(seconds[part]) for part in ("packed", "published", "mixed")) < 120


@pytest.mark.parametrize("documents", [(), (300, 100, 112)])
def test_a_corpus_has_a_token_a_letter_and_one_for_the_end(documents: tuple[int, ...], tmp_path: Path) -> None:
    write_corpus(Row("packed", "debug", 512, documents=documents), tmp_path / "corpus.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert sorted(len(text) + 1 for text in texts) == sorted([*(documents or (512,))] * 4)
    assert len(set(texts)) == len(texts)


def test_a_rehearsal_has_a_tiny_row_of_each_kind() -> None:
    kinds = {part: rehearsed(rows) for part, rows in ROWS.items()}
    assert [len(rows) for rows in kinds.values()] == [1, 1, 1, 2, 2]
    assert [row.architecture for row in kinds["mixed"]] == ["qwen3_5", "moe"]
    assert all(row.length == 256 and sum(row.documents) in (0, 256) for rows in kinds.values() for row in rows)
