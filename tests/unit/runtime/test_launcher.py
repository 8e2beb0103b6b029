"""The exit code of a job whose ranks torchrun's agent gives up."""

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from torchtitan_cp.runtime import launcher


@pytest.mark.parametrize(("state", "code"), [(WorkerState.SUCCEEDED, 0), (WorkerState.UNHEALTHY, 1)])
def test_a_job_whose_ranks_do_not_answer_has_not_succeeded(
    state: WorkerState, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Agent:
        stopping = False

        def __init__(self, *_: object) -> None: ...

        def run(self) -> RunResult:
            return RunResult(state)

    monkeypatch.setattr(launcher, "NodeAgent", Agent)
    meeting = launcher.RendezvousParameters("c10d", launcher.LOCALHOST, "test", 1, 1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        assert launcher._run(["train.py"], 1, 0, meeting, tmp_path).code == code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
