"""When a rank dies or hangs: end the job within a set time, and say which rank it was and what it was doing.

A rank's main thread says what it begins with `doing`. A thread beside it tells the others through the job's store,
several times within the time that is allowed, and ends the process when that is over: the launcher then starts all
ranks again, or ends the job.
"""

import dataclasses
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)

# What gloo and NCCL say of a peer that is gone or silent. Source: gloo's transport/tcp, ProcessGroupNCCL.
LOST_CONTACT = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|remote process exited|NCCL.*(error|abort)",
    re.IGNORECASE,
)
LOST_RANK = 4
# A store that has not answered by then is taken for gone.
ANSWER_SECONDS = 10.0
FIRST_BEATS_SECONDS = 0.5
STORE_HOST = 0  # the rank that holds the job's store, where each attempt has one of its own
# torchrun looks at its processes every 0.1 s, and reports the first that failed: the dead one, if we linger.
GRACE_SECONDS = 2.0
PACKAGE = str(Path(__file__).parents[1]) + os.sep


class LostRankError(RuntimeError):
    """A collective failed because another rank is gone or silent."""


@dataclass(frozen=True)
class Activity:
    """What this process's main thread does.

    Attributes:
        what: in words.
        step: optimizer step it belongs to, from 1; 0 before the first.
        limit_seconds: the job is ended when it takes longer.
        since: time.monotonic() of its beginning.
    """

    what: str
    step: int
    limit_seconds: float
    since: float


@dataclass(frozen=True)
class Beat:
    """What a rank last told the others.

    Attributes:
        number: beats so far; one that stays is a rank that is silent.
        activity_seconds: how long it had been at it.
        place: innermost line of ours that its main thread was in.
    """

    number: int
    host: str
    pid: int
    what: str
    step: int
    activity_seconds: float
    place: str

    def __str__(self) -> str:
        step = f"step {self.step}" if self.step else "before its first step"
        return f"on {self.host}, pid {self.pid}: {step}, {self.what} for {self.activity_seconds:.0f} s, at {self.place}"


_now = Activity("starting", 0, float("inf"), time.monotonic())


def set_activity(what: str, step: int, limit_seconds: float) -> None:
    """Say what this rank begins; the time it may take counts from here.

    Args:
        what: in words that fit behind "rank 3 is", e.g. "waiting for its batch".
        step: optimizer step it belongs to, from 1; 0 before the first.
        limit_seconds: the job is ended when it takes longer.
    """
    global _now
    _now = Activity(what, step, limit_seconds, time.monotonic())


class Watchdog:
    """Watches over this rank while it is entered, and can say where every rank is.

    Args:
        world_size: ranks of the job; rank: this one.
        beat_seconds: between two messages to the others.
        folder: of the run, for what the flight recorder of collectives holds.
    """

    def __init__(self, rank: int, world_size: int, beat_seconds: float, folder: str | Path) -> None:
        self.rank, self.world_size, self.beat_seconds, self.folder = rank, world_size, beat_seconds, Path(folder)
        # Connections of the thread's own: a wait of the main thread on the store would hold it up, and a question that
        # is not answered what it has to tell.
        store = distributed_c10d._get_default_store()
        self._telling, self._asking = store.clone(), store.clone()  # type: ignore[attr-defined]
        self._main, self._left, self._beats = threading.get_ident(), threading.Event(), 0
        # What is known where the store is gone: this rank, and the one that held it.
        self._known: dict[int, Beat] = {}
        self._told, self._answered = True, True
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            activity = _now
            self._tell(activity)
            if time.monotonic() - activity.since > activity.limit_seconds and activity is _now:
                self._give_up(activity)
            # Until the rank that holds the store has said something: it may be the first to die.
            known = STORE_HOST in self._known
            if self._left.wait(self.beat_seconds if known else min(FIRST_BEATS_SECONDS, self.beat_seconds)):
                return

    def _tell(self, activity: Activity) -> None:
        """Tell the others what this rank does."""
        self._beats += 1
        seconds = time.monotonic() - activity.since
        place = _place(sys._current_frames().get(self._main))
        beat = Beat(self._beats, socket.gethostname(), os.getpid(), activity.what, activity.step, seconds, place)
        self._tell_store(f"beat/{self.rank}", json.dumps(dataclasses.asdict(beat)))
        self._known = {**self._known, **self._read([STORE_HOST]), self.rank: beat}

    def _tell_store(self, name: str, text: str) -> None:
        """Does not wait. A store that is gone is told no more: every time costs a page of log."""
        if self._told:
            try:
                self._telling.set(name, text)
            except RuntimeError:
                self._told = False

    def _ask(self, question: Callable[[], Any], otherwise: Any) -> Any:
        """What the store answers. One that is gone, or stopped with the rank that holds it, is asked no more."""
        answers: list[Any] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        if self._answered:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(ANSWER_SECONDS)
            self._answered = bool(answers)
        return answers[0] if answers else otherwise

    def _give_up(self, activity: Activity) -> None:
        """End this process, whose main thread hangs."""
        self.report(
            f"no progress in {activity.limit_seconds:g} s: rank {self.rank} was {activity.what}; the job is ended"
        )
        sys.stderr.flush()
        # No thread and no collective can hold this up.
        os._exit(LOST_RANK)

    def report(self, reason: str) -> None:
        """Log who is to blame, on the first rank that asks, and write what the flight recorder has, on each."""
        self._tell_store(f"over/{self.rank}", "")
        beats, silent = self._look_around()
        if self._is_first():
            logger.error("%s.\n%s", reason, describe(beats, silent))
        dump_flight_recorder(self.folder, self.rank)

    def _is_first(self) -> bool:
        return bool(self._ask(lambda: self._asking.add("reports", 1) == 1, True))

    def _look_around(self) -> tuple[dict[int, Beat], set[int]]:
        """The last beat of each rank that told any, and the ranks that are dead, stopped or silent."""
        everyone = range(self.world_size)
        first = self._read(everyone)
        local = {rank: beat.pid for rank, beat in first.items() if beat.host == socket.gethostname()}
        silent = {rank for rank, pid in local.items() if _is_gone(pid)}
        if not silent - self._over() and self._answered:
            for _ in range(6):
                self._tell(_now)
                time.sleep(self.beat_seconds / 2)
            beats = self._read(everyone)
            silent = {rank for rank in first if rank in beats and first[rank].number == beats[rank].number}
            silent |= set(everyone) - beats.keys()
            first = beats
        if not self._answered:
            return self._known, {STORE_HOST} - {self.rank}
        # Those that gave up before this one did no wrong.
        return first, silent - self._over() - {self.rank}

    def _read(self, ranks: Iterable[int]) -> dict[int, Beat]:
        beats = {}
        for rank in ranks:
            if self._ask(lambda rank=rank: self._asking.check([f"beat/{rank}"]), False):  # type: ignore[misc]
                text = self._ask(lambda rank=rank: self._asking.get(f"beat/{rank}"), None)  # type: ignore[misc]
                if text:
                    beats[rank] = Beat(**json.loads(text))
        return beats

    def _over(self) -> set[int]:
        """Ranks that have given up."""
        return {
            rank
            for rank in range(self.world_size)
            if self._ask(lambda rank=rank: self._asking.check([f"over/{rank}"]), False)  # type: ignore[misc]
        }


def describe(beats: dict[int, Beat], silent: set[int]) -> str:
    """Who is to blame, as far as the beats tell: silent ranks, else those that are behind the others."""
    if silent:
        lines = [f"rank {rank} is dead, stopped or cut off. Last heard {_last(beats, rank)}" for rank in sorted(silent)]
    else:
        states = {rank: (beat.step, beat.what) for rank, beat in beats.items()}
        common = max(set(states.values()), key=list(states.values()).count)
        behind = [rank for rank, state in states.items() if state != common] or list(beats)
        lines = [f"rank {rank} hangs {_last(beats, rank)}" for rank in behind]
    others = sorted(beats.keys() - silent)
    lines += [f"rank {rank} waits for the others {_last(beats, rank)}" for rank in others[:1] if silent]
    return "\n".join(f"  {line}" for line in lines[:16])


def _last(beats: dict[int, Beat], rank: int) -> str:
    return str(beats[rank]) if rank in beats else "never: it did not get so far as to join"


def _place(frame: Any) -> str:
    """File, line and function of the innermost frame that is ours."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{name[len(PACKAGE) :]}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "no line of the trainer"


def _is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended or is stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()
    except OSError:
        return False
    return state in "ZXTt"


def dump_flight_recorder(folder: Path, rank: int) -> None:
    """Write the collectives that this rank has begun and ended lately, where torch records them, as JSON."""
    # NCCL's groups record in a place of their own.
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")[0 if nccl else 1 :]
    found = (getattr(torch._C._distributed_c10d, name, None) for name in names)
    if dump := next(filter(None, found), None):
        with suppress(OSError, RuntimeError):
            (folder / "flight_recorder").mkdir(parents=True, exist_ok=True)
            (folder / "flight_recorder" / f"rank-{rank}.json").write_bytes(dump())


@contextmanager
def name_lost_ranks(watch: Watchdog | None = None) -> Iterator[None]:
    """Turn a transport error into one message, and leave the launcher time to see which rank died first.

    Args:
        watch: knows where the ranks were; None while they have not joined yet.

    Raises:
        LostRankError: in place of the transport's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not LOST_CONTACT.search(str(error)):
            raise
        reason = str(error).strip().splitlines()[0]
        if watch:
            watch.report(f"lost contact with another rank ({reason})")
        else:
            logger.error("lost contact with another rank (%s) before the ranks had joined", reason)
        time.sleep(GRACE_SECONDS)
        raise LostRankError(reason) from None
