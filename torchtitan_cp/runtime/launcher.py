"""Starts the ranks of one node with torchrun's agent, restarts them after a crash, and passes stop signals on.

torchrun itself answers SIGTERM by killing its ranks after 30 seconds, and dies of SIGUSR1. Here the ranks get SIGTERM,
finish their step, save and leave with exit code 0.
"""

import itertools
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from torchtitan_cp.runtime.job_notes import FOLDER_VARIABLE, EndNote, end_notes, take_relaunch
from torchtitan_cp.runtime.signals import STOP

# Ranks that have no note of their own yet may still be writing to disk what went wrong.
NOTE_SECONDS = 5.0
CRASH_SECONDS = 10
# At the end, nodes wait for what rank 0 exports, and then for each other.
EXPORT_SECONDS, EXIT_SECONDS = 86_400.0, 300.0
POLL_SECONDS = 1.0
LOCALHOST = "localhost:0"


class JobEndedError(Exception):
    """The job ends with the EndNote given: a rank wrote it, or a stop signal came while no rank was running."""


class NodeAgent(LocalElasticAgent):
    """torchrun's agent of one node, which hears stop signals and what its ranks write down.

    Args:
        spec: what the agent starts, how often, and where nodes meet.
        notes: folder of the ranks' notes.
    """

    def __init__(self, spec: WorkerSpec, notes: Path) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(notes)))
        self.notes, self.stopping, self.ranks = notes, False, dict[int, int]()
        for number in STOP:
            signal.signal(number, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        repeated, self.stopping, self._remaining_restarts = self.stopping, True, 0
        for pid in self.ranks.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if not repeated:
            with suppress(OSError):  # what read it may have got the signal too
                print(f"{signal.Signals(number).name}: the ranks finish their step, save and stop", file=sys.stderr)
        if not self.ranks:
            raise JobEndedError(EndNote(0, ""))

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        if self.stopping:  # the signal came while the ranks of a failed attempt were ended
            raise JobEndedError(EndNote(0, ""))
        super()._initialize_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # A rank inherits the mask: the signal waits until StopSignals can answer it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
        try:
            self.ranks = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self.ranks

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if notes := end_notes(self.notes):
            (written, first), complete = notes[0], len(notes) == worker_group.spec.local_world_size
            if complete or result.state == WorkerState.FAILED or time.time() - written > NOTE_SECONDS:
                raise JobEndedError(first)
        return result

    def _exit_barrier(self) -> None:
        """Wait for the other nodes, as the job's store may be on this one. torch's own barrier hears no signal."""
        store: Any = self._store
        group, self.ranks = self._worker_group, {}  # without ranks a signal ends the job at once
        deadline = time.monotonic() + EXPORT_SECONDS
        with suppress(RuntimeError):  # the node of the store has left
            store.add("nodes left", 1)
            if group.group_rank == 0:
                store.set("rank 0 left", "")
            while store.add("nodes left", 0) < group.group_world_size and time.monotonic() < deadline:
                if store.check(["rank 0 left"]):
                    deadline = min(deadline, time.monotonic() + EXIT_SECONDS)
                time.sleep(POLL_SECONDS)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """SIGTERM asks a rank to save first; ranks of a job that ended by a message or Ctrl-C are killed.

        After a crash the other ranks wait for the lost one, and only what they write to disk may still end.
        """
        ended = isinstance(sys.exc_info()[1], (JobEndedError, KeyboardInterrupt, SignalException))
        if self._pcontext:  # closed here, as torch 2.11's _shutdown takes no timeout
            self._pcontext.close(signal.SIGKILL if ended else death_sig, timeout if self.stopping else CRASH_SECONDS)
        super()._shutdown()
        self.ranks = {}


def launch(
    program: Sequence[str], ranks: int, nodes: int, endpoint: str, *, join_seconds: float, max_restarts: int
) -> int:
    """Run a Python program on this node's ranks until the job ends. Returns its exit code.

    Args:
        program: its file and arguments.
        ranks: of this node.
        nodes: of the job; endpoint: HOST:PORT where they meet; join_seconds: how long one waits for the others.
        max_restarts: times that all ranks start again after one crashed or hung.
    """
    for name in ("multiprocessing.api", "agent.server.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    # A store shared by all attempts gives restarted ranks the addresses of dead ones. Source: pytorch issue 135712.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Under nohup a job outlives its terminal.
    hang_up = "" if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ",SIGHUP"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = f"SIGINT,SIGQUIT{hang_up}"
    with tempfile.TemporaryDirectory(prefix="torchtitan-cp-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        for number in itertools.count():
            meeting = RendezvousParameters(
                "c10d", endpoint, f"launch-{number}", nodes, nodes, join_timeout=math.ceil(join_seconds)
            )
            note = _run(program, ranks, max_restarts, meeting, Path(folder))
            if note.message:
                print(note.message, file=sys.stderr)
            if note.code or not take_relaunch(Path(folder)):
                return note.code
    raise AssertionError


def _run(program: Sequence[str], ranks: int, max_restarts: int, meeting: RendezvousParameters, notes: Path) -> EndNote:
    """Run the ranks until the job ends or relaunches."""
    handler: Any = None
    try:
        handler = _join(meeting)
        spec = WorkerSpec("trainer", ranks, handler, None, sys.executable, ("-u", *program), max_restarts)
        agent = NodeAgent(spec, notes)
        result = agent.run()
        if agent.stopping:
            take_relaunch(notes)
        if result.state == WorkerState.UNHEALTHY:  # stuck in the kernel, where a variable of torch 2.13 asks for that
            return EndNote(1, "error: a rank is stuck; the launcher's log above says where")
        if not result.is_failed():
            return EndNote(0, "")
        error = ChildFailedError(program[0], result.failures)
        return EndNote(max(1, error.get_first_failure()[1].exitcode), str(error))
    except JobEndedError as end:
        take_relaunch(notes)
        return EndNote(*end.args[0])
    except RendezvousClosedError:
        return EndNote(1, "error: another node ended the job; its output says why")
    except RendezvousError as error:
        return EndNote(1, f"error: the nodes of the job lost each other: {error}")
    except (SignalException, KeyboardInterrupt) as stop:
        number = getattr(stop, "sigval", signal.SIGINT)
        outcome = "the ranks were ended; the same command resumes from the last checkpoint"
        return EndNote(128 + number, f"{number.name}: {outcome}")
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # until the next agent, if there is one
        if handler:
            handler.shutdown()


def _join(meeting: RendezvousParameters) -> Any:
    """Connect to node 0, which may start later than this one. torch tries for two minutes, and hears no signal then."""
    deadline = time.monotonic() + meeting.get("join_timeout", 0)
    while True:
        try:
            return get_rendezvous_handler(meeting)
        except RendezvousConnectionError:
            if time.monotonic() > deadline:
                raise
        if signal.sigpending() & set(STOP):  # blocked between two launches
            raise JobEndedError(EndNote(0, ""))
        print(f"node 0 does not answer at {meeting.endpoint} yet; trying again", file=sys.stderr)
        time.sleep(POLL_SECONDS)
