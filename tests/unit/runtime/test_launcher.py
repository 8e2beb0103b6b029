"""How a node joins a job, and the exit code of one whose ranks torchrun's agent gives up."""

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

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


def test_a_node_waits_for_node_0_as_long_as_a_start_may_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: list[RendezvousConnectionError | str] = [RendezvousConnectionError("refused"), "joined"]

    def connect(meeting: launcher.RendezvousParameters) -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, str):
            return outcome
        raise outcome

    monkeypatch.setattr(launcher, "get_rendezvous_handler", connect)
    monkeypatch.setattr(launcher, "JOIN_SECONDS", 0.01)
    meeting = launcher.RendezvousParameters("c10d", "node0:29500", "test", 2, 2, join_timeout=60)
    assert launcher._join(meeting) == "joined"
    assert "node 0 does not answer at node0:29500 yet" in capsys.readouterr().err
    outcomes.append(RendezvousConnectionError("refused"))
    meeting.config["join_timeout"] = -1
    with pytest.raises(RendezvousConnectionError):
        launcher._join(meeting)
