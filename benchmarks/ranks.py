"""gloo ranks of one thread beside this process, which uses as many threads as there are ranks.

Both sides of a comparison run in turn on the same cores, so that a noisy machine slows both; the ratio is
what counts.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_cp.runtime.gloo import use_one_thread

Run = Callable[[], Any]
PIPES: list[Connection] = []  # of this rank to the process that asks, once there is one
FORK = multiprocessing.get_context("forkserver")
# Imported once by the fork server; every rank starts from there.
PRELOADED = ["torchtitan_cp.training.trainer", "benchmarks.strategies"]


def seconds(run: Run) -> float:
    """Wall time of one call."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


class Ranks:
    """Ranks that make what they are told to, and time it or answer with it as often as asked."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes = pipes

    def make(self, factory: Callable[..., Run], *arguments: Any) -> None:
        """Have every rank call a module-level `factory`, and run what it returns once."""
        self._ask(("make", factory, arguments))

    def time(self) -> float:
        """Seconds of the slowest rank for one run, all starting together."""
        return max(self._ask(("time",)))

    def answer(self) -> list[Any]:
        """What one run returns, on each rank."""
        return self._ask(("answer",))

    def _ask(self, what: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self.pipes]


@contextmanager
def start_ranks(count: int, threads: int = 1) -> Iterator[Ranks]:
    """Start ranks of so many threads each, and stop them at the end."""
    folder = tempfile.TemporaryDirectory()
    store = f"{folder.name}/store"
    pipes, processes = [], []
    FORK.set_forkserver_preload(PRELOADED)
    for rank in range(count):
        here, there = FORK.Pipe()
        process = FORK.Process(target=_serve, args=(rank, count, threads, store, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        yield Ranks(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
        folder.cleanup()


def take_turn(value: Any) -> None:
    """Inside a run, answer with this, and go on when asked again: so that long runs take turns step by step."""
    (pipe,) = PIPES
    pipe.send(value)
    pipe.recv()


def _serve(rank: int, count: int, threads: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    tempfile.tempdir = str(Path(store).parent)  # what a rank leaves there is deleted with it
    use_one_thread()
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count)
    PIPES.append(pipe)
    run: Run = lambda: None  # noqa: E731
    while True:
        kind, *rest = pipe.recv()
        if kind == "make":
            run = rest[0](*rest[1])
            run()
            pipe.send(None)
        elif kind == "time":
            dist.barrier()
            pipe.send(seconds(run))
        else:
            pipe.send(run())


def compare(single: Run, ranks: Ranks, rounds: int) -> dict[str, float]:
    """Time both sides in turn: medians in milliseconds, their ratio, and the ratio of the fastest."""
    single()
    pairs = [(seconds(single), ranks.time()) for _ in range(rounds)]
    alone, split = ([pair[side] * 1e3 for pair in pairs] for side in (0, 1))
    return {
        "single_ms": statistics.median(alone),
        "ranks_ms": statistics.median(split),
        "ratio": statistics.median(split) / statistics.median(alone),
        "ratio_of_fastest": min(split) / min(alone),
    }
