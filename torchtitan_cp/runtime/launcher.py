"""Starts the ranks of one node with torchrun's agent, restarts them after a crash, and passes stop signals on.

torchrun itself answers SIGTERM and Ctrl-C by killing its ranks after 30 seconds, and dies of SIGUSR1. Here the ranks
get SIGTERM, finish their step, save and leave with exit code 0. Ctrl-C after that kills them.
"""

import copy
import itertools
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

from torch.distributed import DistNetworkError, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.run import Job
from torchtitan_cp.runtime.environment import LAUNCHER_VARIABLE
from torchtitan_cp.runtime.job_notes import FOLDER_VARIABLE, EndNote, end_notes, is_unfinished, take_relaunch
from torchtitan_cp.runtime.nodes import ask, is_own, own_address, route_to
from torchtitan_cp.runtime.signals import SAME_PRESS_SECONDS, STOP
from torchtitan_cp.runtime.watchdog import LOST_RANK

# After a rank's end note the other ranks may still write to disk what went wrong.
NOTE_SECONDS = 5.0
CRASH_SECONDS = 10
# At the end, nodes wait for what rank 0 exports, and then for each other.
EXPORT_SECONDS, EXIT_SECONDS = 86_400.0, 300.0
CONNECT_SECONDS = 5.0
POLL_SECONDS = 1.0
LOCALHOST = "localhost:0"
RANK_0_DONE_KEY, NODES_DONE_KEY = "nodes with rank 0", "nodes"  # whose ranks have finished, in the job's store
RESUMES = "the same command resumes from the last checkpoint"
SHOW_CURSOR = "\x1b[?25h"


class JobEndedError(Exception):
    """Ends the job with an EndNote: a rank wrote it, or a stop signal came while no rank was running."""


class NodeAgent(LocalElasticAgent):
    """torchrun's agent of one node, which also answers stop signals and reads the notes of its ranks.

    Args:
        spec: what the agent starts, how often, and where nodes meet.
        notes: folder of the ranks' notes.
        stopping: set when a stop signal comes.
        stopped_code: exit code of a job that such a signal ends while no rank runs.
    """

    _store: Store  # type: ignore[assignment]
    _stopped_at: float  # time.monotonic() at the first stop signal

    def __init__(self, spec: WorkerSpec, notes: Path, stopping: threading.Event, stopped_code: int) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(notes)))
        self.notes, self.stopping, self.stopped_code = notes, stopping, stopped_code
        self.ranks = dict[int, int]()
        for number in STOP:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        repeated, self._remaining_restarts, now = self.stopping.is_set(), 0, time.monotonic()
        if repeated and number == signal.SIGINT and now - self._stopped_at > SAME_PRESS_SECONDS:
            raise SignalException("Ctrl-C while the ranks stop", signal.SIGINT)
        self.stopping.set()
        for pid in self.ranks.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if not repeated:
            self._stopped_at = now
            told = f"{signal.Signals(number).name}: the ranks finish their step, save and stop"
            told += "; Ctrl-C again ends them at once" * (number == signal.SIGINT)
            with suppress(OSError):  # the process that reads the output may have got the signal too
                print("\n" * sys.stderr.isatty() + told, file=sys.stderr)  # below the ranks' progress bar
        if not self.ranks:
            raise JobEndedError(EndNote(self.stopped_code, ""))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self.stopping.is_set():  # the signal came after a failed attempt
            raise JobEndedError(EndNote(self.stopped_code, ""))
        spec = worker_group.spec
        if restarts := spec.max_restarts - self._remaining_restarts:
            print(f"all ranks start again, {restarts} of {spec.max_restarts} times", file=sys.stderr)
        super()._rendezvous(worker_group)
        nodes = spec.rdzv_handler.settings.max_nodes  # type: ignore[attr-defined]
        if (met := worker_group.group_world_size) != nodes:  # it drops a node whose last sign of life is 15 s old
            lost = f"error: {met} of {nodes} nodes would train alone: another one is lost, or its clock differs by over"
            raise JobEndedError(
                EndNote(LOST_RANK, f"{lost} 15 s\n  fix: set the clocks of all nodes by NTP; {RESUMES}")
            )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        # A rank inherits the mask, so that a signal waits until StopSignals can answer it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
        try:
            self.ranks = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self.ranks

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result, spec = super()._monitor_workers(worker_group), worker_group.spec
        ended_elsewhere = (
            result.state == WorkerState.HEALTHY
            and spec.rdzv_handler.is_closed()
            # A node whose ranks have finished is left out: a stop signal ended its wait for the others.
            and ask(partial(self._store.check, [NODES_DONE_KEY]), EXIT_SECONDS) != [True]
        )
        if ended_elsewhere:
            time.sleep(NOTE_SECONDS)
            result = super()._monitor_workers(worker_group)
        if notes := end_notes(self.notes):
            (written, first), complete = notes[0], len(notes) == spec.local_world_size or ended_elsewhere
            if complete or result.state == WorkerState.FAILED or time.time() - written > NOTE_SECONDS:
                raise JobEndedError(first)
        if ended_elsewhere and result.state == WorkerState.HEALTHY:
            raise RendezvousClosedError
        return result

    def _exit_barrier(self) -> None:
        """Wait for the other nodes, as this one may hold the job's store. torch's own barrier blocks signals."""
        if not is_unfinished(self.notes):
            self.stopped_code = 0
        store, group, self.ranks = self._store, self._worker_group, {}  # without ranks a signal ends the job at once
        limits = {RANK_0_DONE_KEY: (1, EXPORT_SECONDS), NODES_DONE_KEY: (group.group_world_size or 1, EXIT_SECONDS)}
        if not ask(
            lambda: [store.add(key, key == NODES_DONE_KEY or group.group_rank == 0) for key in limits], EXIT_SECONDS
        ):
            return
        for key, (nodes, seconds) in limits.items():
            deadline = time.monotonic() + seconds
            while (finished := ask(partial(store.add, key, 0), EXIT_SECONDS)) and finished[0] < nodes:
                if time.monotonic() > deadline:
                    print(f"{finished[0]} of {nodes} {key} have finished; no longer waiting", file=sys.stderr)
                    return
                time.sleep(POLL_SECONDS)
            if not finished:  # the store's node has left, or is lost
                return

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the ranks: kill them if the job ended by a message or at once; otherwise let them save or write first.

        After a crash the other ranks wait for the lost one and can only finish what they write to disk, which takes
        less time than a step and a save after a stop signal.
        """
        ended = isinstance(sys.exc_info()[1], (JobEndedError, KeyboardInterrupt, SignalException))
        if self._pcontext:  # closed here, as torch 2.11's _shutdown takes no timeout
            try:
                self._pcontext.close(
                    signal.SIGKILL if ended else death_sig, timeout if self.stopping.is_set() else CRASH_SECONDS
                )
            except SignalException:  # Ctrl-C ends this wait too
                self._pcontext.close(signal.SIGKILL)
                raise
        super()._shutdown()
        self.ranks = {}


def launch(program: Sequence[str], ranks: int, nodes: int, endpoint: str, job: Job, *, stopped_code: int = 0) -> int:
    """Run a Python program on this node's ranks until the job ends. Returns its exit code.

    Args:
        program: its file and arguments.
        ranks: of this node.
        nodes: of the job; endpoint: HOST:PORT where they meet.
        job: [job], which says how long nodes wait for each other and how often all ranks start again after one crashed
            or hung. Its folder distinguishes this job from another one at the same endpoint.
        stopped_code: exit code if a stop signal, on any node, ends the run before its end.
    """
    for name in ("multiprocessing.api", "agent.server.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    # A store shared by all attempts gives restarted ranks the addresses of dead ones. Source: pytorch issue 135712.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # A job started under nohup survives its terminal.
    hang_up = "" if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ",SIGHUP"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = f"SIGQUIT{hang_up}"
    with tempfile.TemporaryDirectory(prefix="torchtitan-cp-") as notes:
        os.environ[FOLDER_VARIABLE], os.environ[LAUNCHER_VARIABLE] = notes, str(os.getpid())
        for number in itertools.count():
            meeting = RendezvousParameters("c10d", endpoint, f"launch-{number}", nodes, nodes)
            meeting.config |= {"join_timeout": math.ceil(job.startup_timeout_seconds), "folder": job.dump_folder}
            if note := _run(program, ranks, job.max_restarts, meeting, Path(notes), stopped_code):
                if note.message and sys.stdout.isatty():  # below the progress bar that a killed rank could not remove
                    print(SHOW_CURSOR, flush=True)
                if note.message:
                    print(note.message, file=sys.stderr)
                return note.code
    raise AssertionError


def _run(
    program: Sequence[str],
    ranks: int,
    max_restarts: int,
    meeting: RendezvousParameters,
    notes: Path,
    stopped_code: int = 0,
) -> EndNote | None:
    """Run the ranks until the job ends. Returns None if they asked for a relaunch."""
    handler, stopping = None, threading.Event()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
        handler = _join(meeting, stopping)
        spec = WorkerSpec("trainer", ranks, handler, None, sys.executable, ("-u", *program), max_restarts)
        result = NodeAgent(spec, notes, stopping, stopped_code).run()
        if result.state == WorkerState.UNHEALTHY:  # stuck in the kernel, where a variable of torch 2.13 asks for that
            return EndNote(1, "error: a rank is stuck; the launcher's log above says where")
        if not result.is_failed():
            stopped = is_unfinished(notes)
            return None if take_relaunch(notes) and not stopping.is_set() else EndNote(stopped_code * stopped, "")
        error = ChildFailedError(program[0], result.failures)
        code = max(1, error.get_first_failure()[1].exitcode)
        lost = f"error: ranks were lost, as said above; job.max_restarts = {max_restarts} are used up; {RESUMES}"
        return EndNote(code, lost if code == LOST_RANK else str(error))
    except JobEndedError as end:
        return EndNote(*end.args[0])
    except RendezvousClosedError:
        return EndNote(1, "error: another node ended the job; its output says why")
    except (RendezvousError, DistNetworkError) as error:
        if written := end_notes(notes):  # a rank of this node says why the job ended
            return written[0][1]
        lost = f"no answer at {meeting.endpoint} ({_reason(error)}); node 0 has ended or is lost"
        if isinstance(error, RendezvousTimeoutError):
            waited = f"{socket.gethostname()} waited {meeting.get('join_timeout')} s at {meeting.endpoint}"
            lost = f"{waited}, but not all {meeting.max_nodes} nodes came"
        return EndNote(LOST_RANK, f"error: {lost}; {RESUMES}")
    except ConfigError as error:
        return EndNote(2, f"error: {error}")
    except (SignalException, KeyboardInterrupt) as stop:
        number = getattr(stop, "sigval", signal.SIGINT)
        return EndNote(128 + number, f"{number.name}: the ranks were ended; {RESUMES}")
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # until the next run, if there is one
        if handler:
            with suppress(SignalException, KeyboardInterrupt):
                ask(handler.shutdown, CRASH_SECONDS)


def _reason(error: BaseException) -> str:
    error = error.__cause__ or error
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]


def _join(meeting: RendezvousParameters, stopping: threading.Event) -> RendezvousHandler:
    """Connect to node 0, which may start later than this one.

    Raises:
        ConfigError: the endpoint is another job's, or cannot be reached from other nodes.
        RendezvousConnectionError: node 0 did not answer in the time to join; the cause says why.
    """
    seconds, folder, last_reason = meeting.get("join_timeout", 0), meeting.get("folder"), ""
    deadline = time.monotonic() + seconds
    while True:
        try:
            place = _find_node_0(meeting)
            backend, store = create_backend(place)
            store.set_timeout(timedelta(seconds=seconds))
            break
        except (RendezvousConnectionError, OSError) as error:
            if time.monotonic() > deadline:
                raise RendezvousConnectionError from error.__cause__ or error
            if (reason := _reason(error)) != last_reason:
                print(f"no answer at {meeting.endpoint} yet ({reason}); trying for {seconds} s", file=sys.stderr)
            last_reason = reason
        time.sleep(POLL_SECONDS)

    def call(method: str, *arguments: object) -> bytes:
        nonlocal seconds
        if answer := ask(lambda: getattr(store, method)(*arguments), seconds, stopping):
            return answer[0]
        seconds = 0  # later calls do not wait again
        raise RendezvousConnectionError("the connection broke, or was silent")

    if (other := call("compare_set", "folder", "", folder).decode()) != folder:
        raise ConfigError(
            f"the job at {meeting.endpoint} has job.dump_folder = {other!r}, and this one {folder!r}",
            fix="give each job a port of its own in RDZV_ENDPOINT, and all nodes of a job the same settings",
        )
    backend._call_store = call  # type: ignore[assignment, method-assign]
    return create_handler(store, backend, place)


def _find_node_0(meeting: RendezvousParameters) -> RendezvousParameters:
    """Parameters for torch that go by addresses, where torch would go by the names of machines.

    Raises:
        ConfigError: other nodes cannot reach the endpoint.
        OSError: nothing listens at it yet, or it cannot be reached.
    """
    host, port = parse_rendezvous_endpoint(meeting.endpoint, DEFAULT_PORT)
    there, _ = route_to(host)
    hidden = meeting.max_nodes > 1 and ip_address(there).is_loopback and host not in (there, "localhost")
    if hidden and not ("GLOO_SOCKET_IFNAME" in os.environ or "NCCL_SOCKET_IFNAME" in os.environ):
        raise ConfigError(
            f"on this node {host} is {there}, where no other node finds its ranks",
            fix="name node 0 by its IP address in RDZV_ENDPOINT, or the interface that reaches the other nodes in "
            "GLOO_SOCKET_IFNAME, or correct /etc/hosts",
        )
    place = copy.copy(meeting)
    place.local_addr = None if hidden else own_address(host)
    if is_own(host):
        place.endpoint = f"localhost:{port}"
    else:
        place.config = {**meeting.config, "is_host": False}
        # torch would try for a minute, and hear no signal.
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    return place
