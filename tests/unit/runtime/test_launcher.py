"""How a node joins and leaves a job, and the exit code of one whose ranks torchrun's agent gives up."""

import io
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.run import Job
from torchtitan_cp.runtime import launcher, nodes
from torchtitan_cp.runtime.job_notes import FOLDER_VARIABLE, EndNote
from torchtitan_cp.runtime.watchdog import LOST_RANK


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
    meeting = launcher.RendezvousParameters("c10d", launcher.LOCALHOST, "test", 1, 1, join_timeout=60, folder="run")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        assert launcher._run(["train.py"], 1, 0, meeting, tmp_path).code == code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.parametrize(
    ("noted", "asked_to_stop", "code"),
    [("stopped", False, 143), ("", True, 0), ("relaunch", True, 143), ("relaunch", False, None)],
)
def test_a_run_that_a_signal_ended_before_its_end_has_the_code_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, noted: str, asked_to_stop: bool, code: int | None
) -> None:
    class Agent:
        def __init__(self, spec: object, notes: Path, stopping: threading.Event, stopped_code: int) -> None:
            if noted:
                (notes / noted).touch()
            if asked_to_stop:
                stopping.set()

        def run(self) -> RunResult:
            return RunResult(WorkerState.SUCCEEDED)

    monkeypatch.setattr(launcher, "NodeAgent", Agent)
    meeting = launcher.RendezvousParameters("c10d", launcher.LOCALHOST, "test", 1, 1, join_timeout=60, folder="run")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        note = launcher._run(["train.py"], 1, 0, meeting, tmp_path, 143)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert (note.code if note else None) == code


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> launcher.RendezvousParameters:
    """The second of two nodes, in a network where names mean what `route_to` says."""
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "route_to", lambda host: ("127.0.0.1", "10.0.0.2"))
    monkeypatch.setattr(launcher, "ip_address", lambda address: SimpleNamespace(is_loopback=address != "127.0.0.1"))
    monkeypatch.setattr(launcher, "own_address", lambda host: "127.0.0.1")
    monkeypatch.setattr(launcher, "is_own", lambda host: False)
    return launcher.RendezvousParameters("c10d", "node0:1", "test", 2, 2, join_timeout=60, folder="run")


@pytest.fixture
def node_0(meeting: launcher.RendezvousParameters) -> TCPStore:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting.endpoint = f"127.0.0.1:{store.port}"
    return store


def test_a_node_waits_for_node_0_as_long_as_a_start_may_take(
    meeting: launcher.RendezvousParameters,
    node_0: TCPStore,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    outcomes = [socket.gaierror(-3, "Temporary failure in name resolution")] * 3

    def route_to(host: str) -> tuple[str, str]:
        if outcomes:
            raise outcomes.pop()
        return "127.0.0.1", "10.0.0.2"

    monkeypatch.setattr(launcher, "route_to", route_to)
    launcher._join(meeting, threading.Event())
    said = capfd.readouterr().err
    assert said.count(f"no answer at 127.0.0.1:{node_0.port} yet (Temporary failure in name resolution)") == 1

    meeting.endpoint, meeting.config["join_timeout"] = "127.0.0.1:1", -1
    with pytest.raises(RendezvousConnectionError) as raised:
        launcher._join(meeting, threading.Event())
    assert "Connection refused" in str(raised.value.__cause__)


def test_a_name_that_is_a_loopback_address_on_node_0_itself_is_refused(
    meeting: launcher.RendezvousParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Debian's /etc/hosts. Not where the interface is named, as other nodes may know the name's address."""
    monkeypatch.setattr(launcher, "route_to", lambda host: ("127.0.1.1", "127.0.0.1"))
    monkeypatch.setattr(launcher, "is_own", lambda host: True)
    with pytest.raises(ConfigError, match=r"on this node node0 is 127\.0\.1\.1, where no other node finds its ranks"):
        launcher._find_node_0(meeting)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    place = launcher._find_node_0(meeting)
    assert (place.endpoint, place.local_addr) == ("localhost:1", None)


def test_a_job_at_another_jobs_endpoint_is_refused(meeting: launcher.RendezvousParameters, node_0: TCPStore) -> None:
    launcher._join(meeting, threading.Event())
    meeting.config["folder"] = "other"
    with pytest.raises(ConfigError, match=r"at 127\.0\.0\.1:\d+ has job\.dump_folder = 'run', and this one 'other'"):
        launcher._join(meeting, threading.Event())


def test_a_signal_is_heard_while_node_0_is_silent_and_then_it_counts_as_lost(
    meeting: launcher.RendezvousParameters,
    node_0: TCPStore,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(nodes, "NOTICE_SECONDS", 0.1)
    meeting.config["join_timeout"] = 1
    backend = launcher._join(meeting, threading.Event())._state_holder._backend
    monkeypatch.setattr(TCPStore, "get", lambda *_: threading.Event().wait())
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(RendezvousConnectionError):
            backend.get_state()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]

    monkeypatch.setattr(nodes, "STOP_SECONDS", 0.1)
    stopping = threading.Event()
    stopping.set()
    begun = time.monotonic()
    assert nodes.ask(threading.Event().wait, 60, stopping) == []
    assert time.monotonic() - begun < 5, "not long where it was asked to stop"
    begun = time.monotonic()
    with pytest.raises(RendezvousConnectionError):
        backend.get_state()
    assert time.monotonic() - begun < 0.5, "it is waited for once"
    assert "node 0 has not answered for 0.1 s; waiting up to 1 s for it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RendezvousTimeoutError(), r"waited 60 s at node0:1, but not all 2 nodes came"),
        (DistNetworkError("Failed to recv\nframe"), r"no answer at node0:1 \(Failed to recv\); node 0 has ended"),
        (RendezvousConnectionError(), r"no answer at node0:1 \(.*\); node 0 has ended or is lost"),
    ],
)
def test_nodes_that_lose_each_other_end_with_the_code_of_a_lost_rank(
    meeting: launcher.RendezvousParameters,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    said: str,
) -> None:
    def join(meeting: launcher.RendezvousParameters, stopping: threading.Event) -> None:
        raise error

    monkeypatch.setattr(launcher, "_join", join)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        note = launcher._run(["train.py"], 1, 0, meeting, tmp_path)
        (tmp_path / "end-0").write_text('[3, "error: halted"]')
        halted = launcher._run(["train.py"], 1, 0, meeting, tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert note
    assert note.code == LOST_RANK
    assert re.search(said, note.message)
    assert halted == (3, "error: halted"), "what a rank of this node wrote comes first"


@pytest.fixture
def leaving(tmp_path: Path) -> Iterator[launcher.NodeAgent]:
    """The agent of the second of two nodes, whose ranks have ended."""
    agent = launcher.NodeAgent.__new__(launcher.NodeAgent)
    agent._store, agent._worker_group = HashStore(), SimpleNamespace(group_rank=1, group_world_size=2)  # type: ignore
    agent.stopping, agent.ranks = threading.Event(), {0: 2**22}
    agent.notes, agent.stopped_code = tmp_path, 143
    before = signal.signal(signal.SIGTERM, agent._stop)
    yield agent
    signal.signal(signal.SIGTERM, before)


def test_nodes_do_not_train_without_one_whose_clock_is_wrong(
    leaving: launcher.NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's rendezvous takes it for dead, and goes on with the others."""
    monkeypatch.setattr(launcher.LocalElasticAgent, "_rendezvous", lambda *_: None)
    handler = SimpleNamespace(settings=SimpleNamespace(max_nodes=2))
    leaving._remaining_restarts = 0
    group: Any = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler, max_restarts=0), group_world_size=2)
    leaving._rendezvous(group)
    group.group_world_size = 1
    with pytest.raises(
        launcher.JobEndedError, match=r"1 of 2 nodes would train alone: .* its clock differs by over 15 s"
    ):
        leaving._rendezvous(group)


@pytest.mark.parametrize("finished", [True, False])
def test_ranks_end_soon_after_another_node_has_ended_the_job_but_not_when_it_has_finished(
    leaving: launcher.NodeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished: bool
) -> None:
    monkeypatch.setattr(launcher, "NOTE_SECONDS", 0.1)
    monkeypatch.setattr(launcher.LocalElasticAgent, "_monitor_workers", lambda *_: RunResult(WorkerState.HEALTHY))
    spec = SimpleNamespace(rdzv_handler=SimpleNamespace(is_closed=lambda: True), local_world_size=2)
    leaving.notes, group = tmp_path, SimpleNamespace(spec=spec)
    if finished:
        leaving._store.add(launcher.NODES_DONE_KEY, 1)
        assert leaving._monitor_workers(group).state == WorkerState.HEALTHY  # type: ignore[arg-type]
        return
    with pytest.raises(RendezvousClosedError):
        leaving._monitor_workers(group)  # type: ignore[arg-type]
    threading.Timer(0.02, (tmp_path / "end-1").write_text, ['[2, "error: of this node"]']).start()
    with pytest.raises(launcher.JobEndedError, match="error: of this node"):
        leaving._monitor_workers(group)  # type: ignore[arg-type]


def test_a_stop_signal_ends_a_node_that_waits_for_a_lost_one(leaving: launcher.NodeAgent) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(launcher.JobEndedError) as ended:
        leaving._exit_barrier()
    assert ended.value.args[0].code == 0, "its ranks have finished"


def test_the_first_ctrl_c_stops_the_ranks_and_the_second_ends_the_job(
    leaving: launcher.NodeAgent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *process: sent.append(process))
    leaving._stop(signal.SIGINT, None)
    leaving._stop(signal.SIGINT, None)  # a wrapper passed the same press on
    assert sent == [(2**22, signal.SIGTERM)] * 2
    said = "SIGINT: the ranks finish their step, save and stop; Ctrl-C again ends them at once\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr(launcher, "SAME_PRESS_SECONDS", -1.0)
    leaving._stop(signal.SIGTERM, None)
    with pytest.raises(launcher.SignalException) as raised:
        leaving._stop(signal.SIGINT, None)
    assert raised.value.sigval == signal.SIGINT


def test_ctrl_c_while_ranks_are_given_time_to_end_kills_them(
    leaving: launcher.NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []

    class Ranks:
        def close(self, number: signal.Signals, timeout: int = 30) -> None:
            closed.append(number)
            if number == signal.SIGTERM:
                raise launcher.SignalException("Ctrl-C", signal.SIGINT)

    leaving._pcontext = Ranks()  # type: ignore[assignment]
    with pytest.raises(launcher.SignalException):
        leaving._shutdown()
    assert closed == [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize(
    ("left", "exit_seconds"),
    [([launcher.RANK_0_DONE_KEY, launcher.NODES_DONE_KEY], 600.0), ([launcher.RANK_0_DONE_KEY], 0.1)],
)
def test_a_node_waits_for_the_others_and_not_for_long_once_rank_0_has_left(
    leaving: launcher.NodeAgent,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    left: list[str],
    exit_seconds: float,
) -> None:
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(launcher, "EXIT_SECONDS", exit_seconds)
    threading.Timer(0.3, lambda: [leaving._store.add(key, 1) for key in left]).start()
    begun = time.monotonic()
    leaving._exit_barrier()
    assert time.monotonic() - begun > 0.25
    assert ("1 of 2 nodes have finished; no longer waiting" in capfd.readouterr().err) == (exit_seconds < 1)


@pytest.mark.parametrize(("handler", "hears"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_under_nohup_a_job_does_not_hear_its_terminal_go(
    monkeypatch: pytest.MonkeyPatch, handler: signal.Handlers, hears: bool
) -> None:
    for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", FOLDER_VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(launcher, "_run", lambda *job: EndNote(0, ""))
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert launcher.launch(["train.py"], 2, 1, launcher.LOCALHOST, Job()) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    handled = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(",")
    assert handled == ["SIGQUIT", *(["SIGHUP"] if hears else [])]


def test_a_stop_while_the_ranks_of_a_failed_attempt_end_starts_no_other() -> None:
    agent = object.__new__(launcher.NodeAgent)
    agent.stopping, agent.stopped_code = threading.Event(), 143
    agent.stopping.set()
    with pytest.raises(launcher.JobEndedError) as ended:
        agent._rendezvous(None)  # type: ignore[arg-type]
    assert ended.value.args[0].code == 143


class Gone(io.StringIO):
    """A stream whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_stop_reaches_the_ranks_where_nobody_reads_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, signals = object.__new__(launcher.NodeAgent), list[tuple[int, int]]()
    agent.stopping, agent.ranks = threading.Event(), {0: 11, 1: 12}
    monkeypatch.setattr(os, "kill", lambda *of: signals.append(of))
    monkeypatch.setattr(sys, "stderr", Gone())
    agent._stop(signal.SIGTERM, None)
    assert agent.stopping.is_set()
    assert signals == [(11, signal.SIGTERM), (12, signal.SIGTERM)]
