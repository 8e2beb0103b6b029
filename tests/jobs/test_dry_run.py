"""Stages of a dry run in processes of their own."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.walks import TWO_BY_TWO, walk_all, walk_of_two
from torchtitan_cp.curriculum import resolve_stages

pytestmark = [pytest.mark.jobs, pytest.mark.deep]


def test_stages_walked_by_processes_of_their_own_come_in_order(tmp_path: Path) -> None:
    config, path = walk_of_two(tmp_path)
    script = (
        "import pickle, sys; from models import ARCHITECTURES; from torchtitan_cp.config import load_config; "
        "from torchtitan_cp.planner import dry_run; from torchtitan_cp.training.registry import register; "
        "register(ARCHITECTURES); dry_run.usable_cores = lambda: 2; "
        "walks = dry_run.dry_run(load_config(sys.argv[1], sys.argv[2:]), 4); "
        "pickle.dump([(w.stage.seq_len, w.peak_bytes, w.by_kind) for w in walks], sys.stdout.buffer)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path), *TWO_BY_TWO], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    alone = walk_all(config, resolve_stages(config, 4))
    assert pickle.loads(done.stdout) == [(w.stage.seq_len, w.peak_bytes, w.by_kind) for w in alone]
