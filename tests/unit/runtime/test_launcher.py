"""How a node joins and leaves a job, and the exit code of one whose ranks torchrun's agent gives up."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore
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
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    meeting = launcher.RendezvousParameters("c10d", "node0:29500", "test", 2, 2, join_timeout=60)
    assert launcher._join(meeting) == "joined"
    assert "node 0 does not answer at node0:29500 yet" in capsys.readouterr().err
    outcomes.append(RendezvousConnectionError("refused"))
    meeting.config["join_timeout"] = -1
    with pytest.raises(RendezvousConnectionError):
        launcher._join(meeting)


@pytest.fixture
def leaving() -> Iterator[launcher.NodeAgent]:
    """The agent of the second of two nodes, whose ranks have ended."""
    agent = launcher.NodeAgent.__new__(launcher.NodeAgent)
    agent._store, agent._worker_group = HashStore(), SimpleNamespace(group_rank=1, group_world_size=2)  # type: ignore
    agent.stopping, agent.ranks = False, {0: 2**22}
    before = signal.signal(signal.SIGTERM, agent._stop)
    yield agent
    signal.signal(signal.SIGTERM, before)


def test_a_stop_signal_ends_a_node_that_waits_for_a_lost_one(leaving: launcher.NodeAgent) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(launcher.JobEndedError):
        leaving._exit_barrier()


@pytest.mark.parametrize(
    ("does", "exit_seconds"), [(("add", "nodes left", 1), 600.0), (("set", "rank 0 left", ""), 0.1)]
)
def test_a_node_waits_for_the_others_and_not_for_long_once_rank_0_has_left(
    leaving: launcher.NodeAgent, monkeypatch: pytest.MonkeyPatch, does: tuple[str, str, object], exit_seconds: float
) -> None:
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(launcher, "EXIT_SECONDS", exit_seconds)
    method, *arguments = does
    threading.Timer(0.3, getattr(leaving._store, method), arguments).start()
    begun = time.monotonic()
    leaving._exit_barrier()
    assert time.monotonic() - begun > 0.25
