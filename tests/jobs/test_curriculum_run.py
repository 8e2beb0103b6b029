"""run_train.sh starts a job anew where a stage wants it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.curricula import dimensions, losses_of

pytestmark = [pytest.mark.jobs, pytest.mark.deep]

REPOSITORY = Path(__file__).parents[2]


def test_run_train_starts_the_job_anew_where_a_stage_wants_another_tp(tmp_path: Path) -> None:
    path = dimensions(tmp_path / "run", 2, 1)
    environment = {**os.environ, "CONFIG_FILE": str(path), "NPROC": "2", "VENV": sys.prefix, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [str(REPOSITORY / "run_train.sh")], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the job restarts from its checkpoint") == 2
    assert len(losses_of(path.parent)) == 9
    assert not list(tmp_path.glob("torchtitan-cp-*"))
