"""Whole jobs under faults: as run_train.sh starts them, or on ranks forked from a process that has imported torch.

A fault comes from outside, at a moment that is read from the job's files.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import train
from tests.support.rank_pool import FORK
from torchtitan_cp.config import load_config
from torchtitan_cp.runtime.launcher import LOCALHOST, launch

REPOSITORY = Path(__file__).parents[2]
# Long, as the machine may be busy.
PATIENCE_SECONDS = 600.0
# A rank that saw the other die has left by then; one that still waits for it to join would wait for minutes.
GRACE_SECONDS = 5.0


def steps_taken(folder: Path) -> int:
    """How many lines a run's metrics.jsonl has."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Job:
    """A job with its output in a file.

    Attributes:
        log: the file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / f"log-{len(list(folder.glob('log-*')))}"
        self.log.touch()
        self._forgotten_bytes = 0

    def ended(self) -> bool:
        raise NotImplementedError

    def rank(self, number: int) -> int | None:
        """Process id of a rank; None while it does not run."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the job with its ranks, if it still runs."""
        raise NotImplementedError

    def says(self, text: str) -> bool:
        """Whether the output since the last `forget` contains this."""
        return text.encode() in self.log.read_bytes()[self._forgotten_bytes :]

    def forget(self) -> None:
        self._forgotten_bytes = self.log.stat().st_size

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds or the job has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition() and not self.ended():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.002)

    def signal_rank(self, number: int, which: signal.Signals) -> None:
        pid = self.rank(number)
        assert pid is not None
        os.kill(pid, which)


def _launch(log: Path, program: list[str], imported: bool) -> None:
    _write_to(log)
    os.chdir(REPOSITORY)
    os.environ |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    job = replace(load_config(Path(program[1]), program[2:]).job, startup_timeout_seconds=600.0)
    if imported:
        waiting = [ImportedPython() for _ in range(2 * (1 + job.max_restarts))]
        subprocess_handler.Popen = lambda **started: waiting.pop(0).run(**started)  # type: ignore[misc, assignment]
    sys.exit(launch(program, 2, 1, LOCALHOST, job))


class ImportedPython:
    """A Python that waits for a program with torch imported, as a rank's own imports take five seconds of a core.

    It is a child of the launcher, forked while that has one thread, and becomes a rank with what the launcher would
    start a new Python with: arguments, environment, session and blocked signals. The rest of subprocess.Popen that
    torchrun's agent calls is here too.
    """

    made: ClassVar[list[int]] = []  # write ends of the pipes of those that wait

    def __init__(self) -> None:
        self.returncode: int | None = None
        there, self.pipe = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            for end in (*self.made, self.pipe):
                os.close(end)
            with os.fdopen(there, "rb") as pipe:
                _become_rank(pipe.read())
        os.close(there)
        self.made.append(self.pipe)

    def run(
        self, *, args: Sequence[str], env: dict[str, str], start_new_session: bool, **files: None
    ) -> "ImportedPython":
        assert list(args[:2]) == [sys.executable, "-u"]
        assert start_new_session
        assert not any(files.values())
        blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        os.write(self.pipe, json.dumps([args[2:], env, blocked]).encode())
        os.close(self.pipe)
        self.made.remove(self.pipe)
        # As Popen does, return when it is in its session.
        while os.getsid(self.pid) != self.pid:
            time.sleep(0.001)
        return self

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (PATIENCE_SECONDS if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", deadline)
            time.sleep(0.01)
        return code


def _become_rank(order: bytes) -> None:
    """Run train.py as the order says; leave if none came, as the launcher has ended."""
    if not order:
        os._exit(0)
    sys.argv, environment, blocked = json.loads(order)
    # As a new Python has them.
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    train.worker_main()
    os._exit(0)


def _write_to(log: Path) -> None:
    """Let this process's output go to a file."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def children(pid: int) -> list[int]:
    """Running child processes."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread may end meanwhile
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


class LaunchedJob(Job):
    """A job of two ranks, as run_train.sh starts it after the config was checked: its launcher is forked.

    Args:
        path: the config.
        overrides: as on the command line.
        imported: its ranks are an ImportedPython each, not a new one.
    """

    def __init__(self, path: Path, *overrides: str, imported: bool = True) -> None:
        super().__init__(path.parent / "logs")
        program = [str(REPOSITORY / "train.py"), str(path), *overrides]
        self.process = FORK.Process(target=_launch, args=(self.log, program, imported))
        self.process.start()

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, which: signal.Signals) -> None:
        """Send a signal to the launcher."""
        os.kill(self.pid, which)

    def ended(self) -> bool:
        return self.process.exitcode is not None

    def wait(self) -> int:
        """Exit code."""
        self.process.join(PATIENCE_SECONDS)
        assert self.process.exitcode is not None, self.log.read_text()
        return self.process.exitcode

    def rank(self, number: int) -> int | None:
        for pid in children(self.pid):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == f"rank {number}\n":
                    return pid
        return None

    def kill(self) -> None:
        if not self.ended():
            ranks = children(self.pid)
            self.process.kill()
            for pid in ranks:
                with suppress(ProcessLookupError):  # what waited to be a rank leaves with its launcher
                    os.kill(pid, signal.SIGKILL)
            self.process.join()


class ForkedJob(Job):
    """train.py on forked ranks, which start within a second. Nothing restarts them.

    Args:
        size: number of ranks.
        path: the config.
        overrides: as on the command line.
        before: a module-level function that each rank calls before train.py.
    """

    def __init__(self, size: int, path: Path, *overrides: str, before: Callable[[], None] | None = None) -> None:
        super().__init__(path.parent / "logs")
        # Outlives every rank, as the launcher's does.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        arguments = [str(path), *overrides]
        self.ranks = [
            FORK.Process(
                target=_run_rank,
                args=(self.log, {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}, arguments, before),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self.ranks:
            process.start()

    def ended(self) -> bool:
        return not any(process.is_alive() for process in self.ranks)

    def wait(self) -> list[int]:
        """Exit codes."""
        for process in self.ranks:
            process.join(PATIENCE_SECONDS)
        assert self.ended(), self.log.read_text()
        return [process.exitcode for process in self.ranks]

    def rank(self, number: int) -> int | None:
        process = self.ranks[number]
        return process.pid if process.is_alive() else None

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()

    def end(self) -> None:
        """After a rank has died, give the others time to end, then kill them, as a launcher does."""
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()


def _run_rank(log: Path, place: dict[str, str], arguments: list[str], before: Callable[[], None] | None) -> None:
    _write_to(log)
    os.environ.update(place)
    torch.set_num_threads(1)
    if before:
        before()
    sys.argv = ["train.py", *arguments]
    train.worker_main()
    os._exit(0)


# Killing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """When a rank dies.

    Attributes:
        after: at least this many steps are taken.
        moment: "start", before the first step; "step"; "save", while a checkpoint is being written; "transition",
            between the last step of a stage and the first of the next; "tokenizing", while the corpus is prepared.
    """

    after: int
    moment: str


def moment_of(folder: Path, stage_ends: Sequence[int]) -> str:
    """What the run is doing, read from its folder. A save between stages counts as a transition."""
    if list((folder / "cache").glob("*.partial/journal.json")):
        return "tokenizing"
    if steps_taken(folder) in stage_ends:
        return "transition"
    return "save" if list((folder / "checkpoints").glob("*.partial")) else "step"


START_SECONDS = 0.3  # a start from a fork takes longer, on an idle machine too


def kill_at(job: Job, kill: Kill, folder: Path, stage_ends: Sequence[int], draw: random.Random, ranks: int) -> bool:
    """SIGKILL to a random rank at a random moment of this kind. Returns whether the job lived to see one."""
    rank = draw.randrange(ranks)
    if kill.moment == "start":
        job.wait_for(lambda: job.rank(rank) is not None)
        time.sleep(draw.random() * START_SECONDS)
        # An idle machine may be through with it by then; the rank dies all the same.
        return _kill_if(job, rank, lambda: not job.says("entered in")) or _kill_if(job, rank, lambda: True)

    def is_there() -> bool:
        began = job.says({"tokenizing": "", "transition": "resumed from"}.get(kill.moment, "entered in"))
        began = began or job.says("entered in")
        return began and steps_taken(folder) >= kill.after and moment_of(folder, stage_ends) == kill.moment

    while not job.ended():
        job.wait_for(is_there)
        time.sleep(draw.random() * 0.05)
        if _kill_if(job, rank, is_there):
            return True
    return False


def _kill_if(job: Job, rank: int, condition: Callable[[], bool]) -> bool:
    """It is held still while it is looked at, so that it dies in the moment that was meant."""
    if job.rank(rank) is None:
        return False
    job.signal_rank(rank, signal.SIGSTOP)
    hit = condition()
    if hit:
        job.forget()
    job.signal_rank(rank, signal.SIGKILL if hit else signal.SIGCONT)
    return hit
