"""Ends the job within a set time after a rank dies or hangs, and says which rank it was and what it was doing.

A rank's main thread calls `set_activity`. A second thread sends the activity to the other ranks through the job's
store, several times within the activity's time limit, and ends the process when the limit is exceeded. The launcher
then starts all ranks again, or ends the job.

Each of these threads also listens to that of the next rank, as the main thread may never learn of a lost rank: gloo
raises when a peer dies, but NCCL leaves the main thread inside CUDA, where no exception reaches it, and neither raises
when a peer is stopped. So the second thread itself reports a lost rank and ends the process.

It also looks for the launcher. If that was killed, nobody would pass a stop signal on or start lost ranks again, so the
thread sends its own process the signal that the launcher sends to stop it, and the ranks save and leave.
"""

import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchtitan_cp.runtime.environment import has_ended, launcher_pid
from torchtitan_cp.runtime.nodes import ask, node_name

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Errors of gloo and NCCL about a peer that is gone or silent. Source: gloo's transport/tcp, ProcessGroupNCCL.
LOST_CONTACT = re.compile(
    r"(?i)connection (closed|reset|refused)|broken pipe|timed? ?out|remote process exited|NCCL.*(error|abort)"
)
# What gloo writes around the reason: a place in its source, and advice.
GLOO_ADVICE = re.compile(r"^\[\S+\.cc:\d+\] |\.? This is typically caused by a remote worker.*")
LOST_RANK = 4
# A store that has not answered in this time is gone.
ANSWER_SECONDS = 10.0
FIRST_BEATS_SECONDS = 0.5
STORE_HOST = 0  # the rank that holds the job's store; each attempt has its own
# torchrun polls its processes every 0.1 s and reports the first that failed. If this rank waits, that is the dead one.
GRACE_SECONDS = 2.0
# How long a rank may be silent: a tenth of its time limit, but at least three beats. A rank sends beats while it
# computes, compiles or writes, unless a call into C holds Python's lock, as unpickling a large object does.
SILENT_FRACTION, SILENT_BEATS, MAX_SILENT_SECONDS = 0.1, 3, 120.0
# The same for a rank whose process on this host has ended or is stopped: it may be leaving, or held by a debugger.
GONE_BEATS = 2
PACKAGE = str(Path(__file__).parents[1]) + os.sep


class LostRankError(RuntimeError):
    """A collective failed because another rank is gone or silent."""


class Activity(NamedTuple):
    """What the main thread does, as `set_activity` takes it; `since` is time.monotonic() at its start."""

    activity: str
    step: int
    limit_seconds: float
    since: float


class Beat(NamedTuple):
    """The last message of a rank to the others. It does not change while the rank is silent.

    Attributes:
        activity_seconds: time since it began.
        place: innermost line of this package in the main thread.
        node: name of its node, as hosts of one image may share their name and their process ids.
    """

    host: str
    pid: int
    activity: str
    step: int
    activity_seconds: float
    place: str
    node: str = ""

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to have ended: it was one of this node."""
        return (self.host, self.node) == (socket.gethostname(), node_name()) and _is_gone(self.pid)

    def __str__(self) -> str:
        step = f"step {self.step}" if self.step else "before its first step"
        seconds = f"{self.activity_seconds:.0f} s"
        return f"on {self.host}, pid {self.pid}: {step}, {self.activity} for {seconds}, at {self.place}"


_now = Activity("starting", 0, float("inf"), time.monotonic())


def set_activity(activity: str, step: int, limit_seconds: float) -> None:
    """Set what this rank does from now on.

    Args:
        activity: words that fit after "rank 3 is", e.g. "waiting for its batch".
        step: optimizer step it belongs to, from 1; 0 before the first.
        limit_seconds: the job ends when it takes longer.
    """
    global _now
    _now = Activity(activity, step, limit_seconds, time.monotonic())


def current_activity() -> Activity:
    """What this rank does now."""
    return _now


class Watchdog:
    """Tells the other ranks what this rank does, and ends its process when that takes too long or a rank is lost.

    A rank is lost if its process on this host has ended or is stopped for two beats, or if it is silent for a tenth of
    the limit of this rank's activity (at least three beats, at most two minutes). The rank before it notices, and the
    others learn of it from the store, so a beat is four requests to the store, however many ranks there are.

    Args:
        rank: this rank; world_size: ranks of the job.
        beat_seconds: between two messages to the others.
        folder: where the flight recorder of collectives is written after a hang.

    Attributes:
        lost_launcher: the launcher, or torchrun, that started this rank has ended.
    """

    def __init__(self, rank: int, world_size: int, beat_seconds: float, folder: str | Path) -> None:
        self.rank, self.world_size, self.beat_seconds, self.folder = rank, world_size, beat_seconds, Path(folder)
        self._next = (rank + 1) % world_size
        # A connection of its own: the main thread may wait on the store for as long as it likes.
        self._store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._reachable, self._answered = True, time.monotonic()
        self._launcher, self.lost_launcher = launcher_pid(), False
        # The last beats of this rank and of the one that holds the store, for when that is gone.
        self._known: dict[int, Beat] = {}
        # The last beat of the rank listened to, and how long this rank waited since. Only its waits count, as the whole
        # job may have been stopped.
        self._heard: Beat | None = None
        self._unheard_seconds = 0.0
        self._found: tuple[dict[int, Beat], dict[int, float]] | None = None
        self._reporting_now, self._reported = threading.Lock(), False
        self._main, self._left = threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._left.set()
        self._thread.join()
        if kind is None:
            self._ask(lambda store: store.set(f"over/{self.rank}", ""), None)
            if self.rank == STORE_HOST:  # the store ends with this rank, and the others must learn that it has left
                left = [f"over/{rank}" for rank in range(self.world_size)]
                self._ask(lambda store: store.wait(left, timedelta(seconds=ANSWER_SECONDS)), None)

    def _watch(self) -> None:
        waited, busy_seconds, looked, watched = 0.0, 0.0, time.monotonic(), _now
        while not self._left.wait(waited):
            activity = _now
            most_silent = min(SILENT_FRACTION * activity.limit_seconds, MAX_SILENT_SECONDS)
            most_silent = max(SILENT_BEATS * self.beat_seconds, most_silent)
            self._beat(most_silent)
            if self._launcher and not self.lost_launcher and has_ended(self._launcher):
                self._stop_without_launcher()
            # No more counts as passed than this thread waited for: a scheduler may have stopped the job meanwhile.
            now = time.monotonic()
            passed = min(now - max(looked, activity.since), waited + most_silent)
            busy_seconds = passed + busy_seconds * (activity is watched) if activity is _now else 0.0
            looked, watched = now, activity
            if busy_seconds > activity.limit_seconds:
                self._end(f"no progress in {activity.limit_seconds:g} s", activity)
            if busy_seconds > self.beat_seconds and not self._reported:
                lost = self._lost_contact(waited, most_silent)
                if lost and not self._left.wait(GRACE_SECONDS):
                    self._end(lost, activity)
            # Often until the rank that holds the store has sent a beat: it may be the first to die.
            waited = self.beat_seconds if STORE_HOST in self._known else min(FIRST_BEATS_SECONDS, self.beat_seconds)

    def _stop_without_launcher(self) -> None:
        """Stop this rank as the launcher would. Its other ranks do so too, and the first to notice says why."""
        self.lost_launcher = True
        if self._ask(lambda store: store.add(f"lost launcher {node_name()}", 1) == 1, True):
            how = "its ranks finish their step, save and stop"
            logger.error("the launcher on %s, pid %d, has ended: %s", socket.gethostname(), self._launcher, how)
        os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, reason: str, activity: Activity) -> None:
        """Report, and end this process at once, whatever its other threads do."""
        self.report(f"{reason}: rank {self.rank} was {activity.activity}; the job is ended")
        sys.stderr.flush()
        os._exit(LOST_RANK)

    def _lost_contact(self, waited: float, most_silent: float) -> str:
        """Why this rank waits in vain; "" as long as the next rank sends beats, or if it has left on purpose.

        Args:
            waited: seconds since the last call.
            most_silent: seconds that a rank may be silent.
        """
        if self._ask(lambda store: store.check(["ended"]), False, most_silent):
            return "another rank ended the job"
        listened_to = self._next if self._reachable else STORE_HOST
        beat = self._known.get(listened_to)
        self._unheard_seconds = self._unheard_seconds + waited if beat == self._heard else 0.0
        self._heard = beat
        gone = not self._reachable or (beat and beat.is_gone)
        enough = self._unheard_seconds >= (GONE_BEATS * self.beat_seconds if gone else most_silent)
        if not enough or listened_to == self.rank or self._reporting([listened_to]):
            return ""
        found, self._unheard_seconds = self._silent_ranks(), 0.0
        if listened_to not in found[1]:
            return ""
        self._found = found
        return f"no sign of life from rank {listened_to} for {found[1][listened_to]:.0f} s"

    def _beat(self, answer_seconds: float = ANSWER_SECONDS) -> None:
        """Tell the others what this rank does now, and listen to the next one."""
        activity, place = _now, _place(sys._current_frames().get(self._main))
        seconds = time.monotonic() - activity.since
        beat = Beat(socket.gethostname(), os.getpid(), activity.activity, activity.step, seconds, place, node_name())
        self._ask(lambda store: store.set(f"beat/{self.rank}", json.dumps(beat)), None, answer_seconds)
        self._known = {**self._known, **self._read({STORE_HOST, self._next}, answer_seconds), self.rank: beat}

    def _ask(self, question: Callable[[dist.Store], T], otherwise: T, answer_seconds: float = ANSWER_SECONDS) -> T:
        """The store's answer, or `otherwise`. A store that is gone, or stopped with its rank, is asked once only."""
        answers = ask(lambda: question(self._store), answer_seconds) if self._reachable else []
        self._reachable = bool(answers)
        self._answered = time.monotonic() if answers else self._answered
        return answers[0] if answers else otherwise

    def _read(self, ranks: Iterable[int], answer_seconds: float = ANSWER_SECONDS) -> dict[int, Beat]:
        """The last beat of each of these ranks that has sent one."""
        wanted = {f"beat/{rank}": rank for rank in ranks}

        def read(store: dist.Store) -> list[tuple[str, bytes]]:
            sent = list(wanted) if store.check(list(wanted)) else [name for name in wanted if store.check([name])]
            return list(zip(sent, store.multi_get(sent), strict=True)) if sent else []

        beats = self._ask(read, list[tuple[str, bytes]](), answer_seconds)
        return {wanted[name]: Beat(*json.loads(text)) for name, text in beats}

    def report(self, reason: str) -> None:
        """Log which rank is to blame, on the first rank that reports, and write this rank's flight recorder."""
        with self._reporting_now:
            if self._reported:
                return
            self._reported = True
            self._ask(lambda store: store.set(f"over/{self.rank}", ""), None)
            if not self._ask(lambda store: store.check(["ended"]), False):
                beats, silent = self._found or self._silent_ranks()
                if self._ask(lambda store: store.add("reports", 1) == 1, True):
                    logger.error("%s.\n%s", reason, describe(beats, silent))
                self._ask(lambda store: store.set("ended", ""), None)
            dump_flight_recorder(self.folder, self.rank)

    def _silent_ranks(self) -> tuple[dict[int, Beat], dict[int, float]]:
        """The last beat of each rank that has sent one, and the silent ranks with the seconds of their silence."""
        everyone, begun = range(self.world_size), time.monotonic()
        first = beats = self._read(everyone)
        silent = {rank for rank, beat in beats.items() if beat.is_gone}
        if not silent - self._reporting(everyone) and self._reachable:
            for _ in range(6):
                self._beat()
                time.sleep(self.beat_seconds / 2)
            beats = self._read(everyone)
            silent = {rank for rank in everyone if rank not in beats or beats[rank] == first.get(rank)}
        silent -= self._reporting(everyone) | {self.rank}
        if not self._reachable:
            return self._known, dict.fromkeys({STORE_HOST} - {self.rank}, time.monotonic() - self._answered)
        return beats, {rank: time.monotonic() - begun + self._unheard_seconds * (rank == self._next) for rank in silent}

    def _reporting(self, ranks: Iterable[int]) -> set[int]:
        """The ranks among these that reported a loss themselves or left at the end, and so are not to blame."""
        return self._ask(lambda store: {rank for rank in ranks if store.check([f"over/{rank}"])}, set[int]())


def describe(beats: dict[int, Beat], silent: dict[int, float]) -> str:
    """Name the ranks to blame: silent ones, each with the seconds; if there are none, those behind the others."""
    if silent:
        known = {rank: f"no sign of life from rank {rank} for {seconds:.0f} s" for rank, seconds in silent.items()}
        known |= {rank: f"rank {rank} has ended or is stopped" for rank in silent.keys() & beats if beats[rank].is_gone}
        lines = [f"{known[rank]}. Last heard {_last(beats, rank)}" for rank in sorted(silent)]
        waiting = sorted(beats.keys() - silent)[:1]
        lines += [f"rank {rank} waits for the others {_last(beats, rank)}" for rank in waiting]
    else:
        states = {rank: (beat.step, beat.activity) for rank, beat in beats.items()}
        common = max(set(states.values()), key=list(states.values()).count)
        behind = [rank for rank, state in states.items() if state != common] or list(beats)
        lines = [f"rank {rank} hangs {_last(beats, rank)}" for rank in behind]
    return "\n".join(f"  {line}" for line in lines[:16])


def _last(beats: dict[int, Beat], rank: int) -> str:
    return str(beats[rank]) if rank in beats else "never: it did not join"


def _place(frame: FrameType | None) -> str:
    """File, line and function of the innermost frame in this package."""
    for caller, line in traceback.walk_stack(frame):
        name = caller.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{name[len(PACKAGE) :]}:{line} in {caller.f_code.co_name}"
    return "no line of the trainer"


def _is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended or is stopped."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZXTt"
    return Path("/proc/self").exists() and not Path(f"/proc/{pid}").exists()


def dump_flight_recorder(folder: Path, rank: int) -> None:
    """Write the latest collectives of this rank as JSON, if torch records them; NCCL has its own recorder."""
    # NCCL's groups have a recorder of their own.
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    with suppress(AttributeError, OSError, RuntimeError):
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json" if nccl else "_dump_fr_trace_json")
        (folder / "flight_recorder").mkdir(parents=True, exist_ok=True)
        (folder / "flight_recorder" / f"rank-{rank}.json").write_bytes(dump())


@contextmanager
def report_lost_ranks(watch: Watchdog | None = None) -> Iterator[None]:
    """Turn a transport error into one message, and give the launcher time to see which rank died first.

    Args:
        watch: this rank's watchdog; None before the ranks have joined.

    Raises:
        LostRankError: instead of the transport's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not LOST_CONTACT.search(str(error)):
            raise
        reason, *more = GLOO_ADVICE.sub("", str(error).strip()).splitlines()
        if "Last error:" in more:  # NCCL's reason, e.g. that the GPU is out of memory
            reason += f" ... {' '.join(more[more.index('Last error:') :])}"
        lost = f"lost contact with another rank ({reason})"
        if watch:
            watch.report(lost)
        else:
            how = "Each node must reach every other, on all ports: see Several nodes in docs/troubleshooting.md"
            logger.error("%s before the ranks had joined, on %s. %s", lost, socket.gethostname(), how)
        time.sleep(GRACE_SECONDS)
        raise LostRankError(reason) from None
