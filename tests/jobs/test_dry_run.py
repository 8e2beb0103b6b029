"""Stages of a dry run in processes of their own."""

from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from models import ARCHITECTURES
from tests.support.rank_pool import FORK
from tests.support.walks import TWO_BY_TWO, walk_all, walk_of_two
from torchtitan_cp.config import load_config
from torchtitan_cp.planner import dry_run
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resolve import resolve_run

pytestmark = [pytest.mark.jobs, pytest.mark.deep]

# Lengths do not matter here.
SHORTER = (*TWO_BY_TWO, "--curriculum.stages[0].seq_len=4096", "--curriculum.stages[0].global_batch_tokens=8192")


def walk_on_two_cores(path: Path, pipe: Connection) -> None:
    """In a process that may fork, as it has one thread."""
    register(ARCHITECTURES)
    dry_run.usable_cores = lambda: 2
    walks = dry_run.dry_run(load_config(path, SHORTER), 4)
    pipe.send([(w.stage.seq_len, w.peak_bytes, w.by_kind) for w in walks])


def test_stages_walked_by_processes_of_their_own_come_in_order(tmp_path: Path) -> None:
    _, path = walk_of_two(tmp_path)
    config = load_config(path, SHORTER)
    here, there = FORK.Pipe()
    process = FORK.Process(target=walk_on_two_cores, args=(path, there))
    process.start()
    there.close()
    walked = here.recv()
    process.join()
    assert process.exitcode == 0
    alone = walk_all(config, resolve_run(config, 4, sized_model_args(config)).stages)
    assert walked == [(w.stage.seq_len, w.peak_bytes, w.by_kind) for w in alone]
