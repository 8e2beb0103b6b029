"""Traces of chosen steps, and what such a step's time went into, without a viewer."""

import gzip
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from torchtitan_cp.config.sections import Profiling as Settings

logger = logging.getLogger(__name__)

FOLDER = "profile"
MOST_EVENTS = 1_000_000  # of a memory snapshot
OPERATIONS = ("aten::", "torchtitan_cp::")  # names of what computes on a CPU
Span = tuple[float, float]


class Profiling:
    """Watches the steps that [profiling] names, on the ranks it names.

    Args:
        folder: of the run.
        settings: [profiling].
        rank: this one.
        device: of the rank.
    """

    def __init__(self, folder: Path, settings: Settings, rank: int, device: torch.device) -> None:
        self.folder, self.settings, self.rank, self.device = folder / FOLDER, settings, rank, device

    @contextmanager
    def watching(self, step: int, messages: Callable[[], tuple[float, float]]) -> Iterator[None]:
        """Trace a step, if it is one of them; write trace and table.

        Args:
            step: of the run, from 1.
            messages: gives the seconds of the step that this rank waited for context-parallel messages, and those
                from their posting until they were needed and there.
        """
        if step not in self.settings.steps or self.rank not in self.settings.ranks:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        on_cuda = self.device.type == "cuda"
        snapshot = on_cuda and self.settings.memory_snapshot
        if snapshot:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
        with profile(activities=activities) as traced:
            begun = time.perf_counter()
            yield
            if on_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
        name = f"step-{step}-rank-{self.rank}"
        self._write_trace(traced, name)
        if snapshot:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        shares = (on_a_gpu if on_cuda else on_a_cpu)(traced.events(), seconds, *messages())
        table = f"step {step}, rank {self.rank}: {seconds:.3f} s\n" + describe(shares, seconds)
        (self.folder / f"{name}.txt").write_text(table + "\n", encoding="utf-8")
        logger.warning("%s\n%s", table, f"trace: {self.folder / name}.json.gz (chrome://tracing, ui.perfetto.dev)")

    def _write_trace(self, traced: Any, name: str) -> None:
        plain = self.folder / f"{name}.json"
        traced.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(f"{plain}.gz", "wb") as packed:
            shutil.copyfileobj(source, packed)
        plain.unlink()


def on_a_cpu(events: Iterable[Any], seconds: float, waited: float, in_flight: float) -> dict[str, float]:
    """Seconds of a step on a CPU by what they went into.

    Args:
        events: of torch.profiler, on any thread.
        seconds: of the step; waited, in_flight: see Profiling.watching.
    """
    outer = [(e.time_range.start, e.time_range.end) for e in events if e.name.startswith(OPERATIONS)]
    computed = max(0.0, covered(outer) / 1e6 - waited)
    return {
        "compute": computed,
        "CP exchange, exposed": waited,
        "CP exchange, hidden (at most)": max(0.0, in_flight - waited),
        "other collectives, waiting and Python": max(0.0, seconds - computed - waited),
    }


def on_a_gpu(events: Iterable[Any], seconds: float, waited: float, in_flight: float) -> dict[str, float]:
    """The same on CUDA, from the times of kernels: messages are those of NCCL."""
    # The ranges that torch and FSDP2 name are there too, as long as all that they hold.
    kernels = [e for e in events if "CUDA" in str(e.device_type) and not getattr(e, "is_user_annotation", False)]
    spans = {
        is_message: [
            (e.time_range.start, e.time_range.end) for e in kernels if ("nccl" in e.name.lower()) == is_message
        ]
        for is_message in (True, False)
    }
    computing, sending, both = covered(spans[False]), covered(spans[True]), covered(spans[True] + spans[False])
    exposed = (both - computing) / 1e6
    return {
        "compute": computing / 1e6,
        "messages, hidden": (computing + sending - both) / 1e6,
        "messages, exposed": exposed,
        "of it CP exchange, by the stream's clock": min(waited, exposed),
        "nothing on the device": max(0.0, seconds - both / 1e6),
    }


def covered(spans: Iterable[Span]) -> float:
    """Length of the union of spans."""
    edges = sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans])
    total, open_spans = 0.0, 0
    for (place, change), (following, _) in pairwise(edges):
        open_spans += change
        total += (following - place) * (open_spans > 0)
    return total


def describe(shares: Mapping[str, float], seconds: float) -> str:
    """A line for each part."""
    width = max(map(len, shares))
    return "\n".join(f"  {name:<{width}}  {part:9.4f} s  {part / seconds:6.1%}" for name, part in shares.items())
