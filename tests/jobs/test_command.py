"""A job that is interrupted before it has ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import children
from tests.support.runs import write_run

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize("seconds", [0.2, 0.8])  # while torch is imported, which swallows some exceptions
def test_ctrl_c_before_a_rank_is_one_line(tmp_path: Path, seconds: float) -> None:
    command = [sys.executable, "-m", "torchtitan_cp.cli.train", str(write_run(tmp_path)), "--nproc", "2"]
    job = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not children(job.pid):  # the check
        assert job.poll() is None
        time.sleep(0.01)
    time.sleep(seconds)
    os.killpg(job.pid, signal.SIGINT)  # as a terminal sends it
    said, _ = job.communicate(timeout=100)
    assert (said, job.returncode) == ("SIGINT: no rank was started\n", 128 + signal.SIGINT)
