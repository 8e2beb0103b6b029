"""Ranks that would not run the same stage are refused before they wait for each other."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, Packed, prepared, write_run
from torchtitan_cp.config import ConfigError
from torchtitan_cp.data.batches.micro_batches import BatchLayout, MicroBatch, read_step
from torchtitan_cp.runtime.consistency import check_agreement

ONE_STEP = TINY.replace("steps = 20", "steps = 1")


def run_with(path: Path, fault: str, *overrides: str) -> str:
    """On a rank: run, with a fault on rank 3; the error."""
    trainer = prepared(path, "--checkpoint.enable=false", *overrides)
    if dist.get_rank() == 3:
        if fault == "seq_len":
            trainer.stages = tuple(replace(stage, seq_len=64) for stage in trainer.stages)
        elif fault == "layout":
            trainer.model.config = replace(
                trainer.model.config,
                context_parallel=replace(trainer.model.config.context_parallel, layout="contiguous"),
            )
        elif fault == "documents":
            data = trainer.data_pipeline

            def steps(first: int, count: int, layout: BatchLayout, **_: Any) -> Iterator[tuple[MicroBatch, ...]]:
                return (read_step(Packed(data.samples, (28, 100)), layout, first + step) for step in range(count))

            data.steps = steps  # type: ignore[assignment,method-assign]
    try:
        trainer.run()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("degrees", [("--parallel.cp=2",), ("--parallel.cp=2", "--parallel.pp=2")], ids=["dp", "pp"])
def test_ranks_that_agree_train(ranks: Callable[[int], RankPool], tmp_path: Path, degrees: tuple[str, ...]) -> None:
    assert ranks(4)(run_with, write_run(tmp_path, ONE_STEP), "", *degrees, timeout=60) == [""] * 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("seq_len", r"in stage 1: seq_len: rank 3 has 64, ranks 0, 1, 2 have 128\n"),
        (
            "layout",
            "in stage 1: the layout of the first batch of data-parallel rank 1: rank 2 has version 1, "
            "rank 3 has version 2\n",
        ),
        (
            "documents",
            r"the documents of the first batch of data-parallel rank 1: rank 2 has version 1, rank 3 has version 2",
        ),
    ],
)
def test_a_rank_that_differs_is_named_by_all_and_nobody_hangs(
    ranks: Callable[[int], RankPool], tmp_path: Path, fault: str, message: str
) -> None:
    found = ranks(4)(run_with, write_run(tmp_path, ONE_STEP), fault, "--parallel.cp=2", timeout=60)
    assert len(set(found)) == 1
    assert re.search(message, found[0])


def compare(facts: list[dict[str, Any]]) -> str:
    try:
        check_agreement("stage 2", facts[dist.get_rank()])
    except ConfigError as error:
        return str(error)
    return ""


def test_a_fact_is_compared_among_the_ranks_that_have_it(ranks: Callable[[int], RankPool]) -> None:
    equal = [{"seq_len": 8, f"documents of {rank // 2}": rank // 2} for rank in range(4)]
    assert ranks(4)(compare, equal) == [""] * 4
    message = "the ranks differ in stage 2: cp: ranks 0, 1 have 2, ranks 2, 3 have 4; a: rank 0 has 0, rank 1 has 1, "
    found = ranks(4)(compare, [{"cp": 2 + rank // 2 * 2, "a": rank} for rank in range(4)])
    assert found[0].startswith(message)
