"""A job that is asked to stop while its corpus is tokenized."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.support.jobs import LaunchedJob
from tests.support.runs import TINY, write_run

pytestmark = [pytest.mark.jobs, pytest.mark.deep]

# Read as one batch, before which no token is written: that takes a thousand times as long as to see that it has begun.
ROWS = 100_000


def test_a_signal_ends_a_job_that_tokenizes_with_exit_code_0_and_what_is_committed_is_kept(tmp_path: Path) -> None:
    path = write_run(tmp_path, TINY.replace('source = "text"', 'source = "jsonl"'))
    (tmp_path / "corpus" / "rows.jsonl").write_text((json.dumps({"text": "row"}) + "\n") * ROWS)
    job = LaunchedJob(path)
    try:
        job.wait_for(lambda: job.says("preparing corpus"))
        # Held still until the launcher has passed the signal on, however long that takes.
        job.signal_rank(0, signal.SIGSTOP)
        job.signal(signal.SIGTERM)
        job.wait_for(lambda: job.says("the ranks finish their step, save and stop"))
        job.signal_rank(0, signal.SIGCONT)
        assert job.wait() == 0, job.log.read_text()
    finally:
        job.kill()
    [tokens] = re.findall(r"stopped while tokenizing: ([\d,]+) tokens are in", job.log.read_text())
    assert 0 < int(tokens.replace(",", "")) < 4 * ROWS
    [partial] = (tmp_path / "cache").glob("*.partial")
    assert json.loads((partial / "journal.json").read_text())["state"]["place"][2] > 0
