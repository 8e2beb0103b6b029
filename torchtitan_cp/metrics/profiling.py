"""Traces of chosen steps, each with a table of where the step's time went."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from torchtitan_cp.config.run import Profiling

logger = logging.getLogger(__name__)

FOLDER = "profile"
MAX_EVENTS = 1_000_000  # in a memory snapshot
OPERATIONS = ("aten::", "torchtitan_cp::")  # prefixes of the operations that compute on a CPU
Span = tuple[float, float]


class StepProfiler:
    """Traces the steps that [profiling] names, on the ranks it names.

    Args:
        folder: the run's; traces, tables and snapshots go below it.
        device: a GPU is waited for at the end of a traced step, and its memory may be recorded.
    """

    def __init__(self, folder: Path, settings: Profiling, rank: int, device: torch.device) -> None:
        self.folder, self.settings, self.rank, self.device = folder / FOLDER, settings, rank, device

    @contextmanager
    def trace(self, step: int, message_seconds: Callable[[], tuple[float, float]]) -> Iterator[None]:
        """Trace a step if the settings name it, and write the trace and the table.

        Args:
            step: counted from 1 over all stages, as [profiling] names it.
            message_seconds: gives the seconds that this rank waited for context-parallel messages in the step, and
                the seconds that messages were in flight.
        """
        if step not in self.settings.steps or self.rank not in self.settings.ranks:
            yield
            return
        on_cuda = self.device.type == "cuda"
        snapshot = on_cuda and self.settings.memory_snapshot
        if snapshot:
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
        with profile(activities=activities) as profiler:
            start = time.perf_counter()
            yield
            if on_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        name = f"step-{step}-rank-{self.rank}"
        trace = f"{self.folder / name}.json.gz"
        parts = (time_on_gpu if on_cuda else time_on_cpu)(profiler.events(), seconds, *message_seconds())
        width = max(map(len, parts))
        rows = [f"  {part:<{width}}  {time:9.4f} s  {time / seconds:6.1%}" for part, time in parts.items()]
        table = "\n".join([f"step {step}, rank {self.rank}: {seconds:.3f} s", *rows])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(trace)
            if snapshot:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.memory.pickle"))
            (self.folder / f"{name}.txt").write_text(table + "\n", encoding="utf-8")
        except OSError as error:
            logger.error("the trace of step %d cannot be written to %s: %s", step, self.folder, error)
            return
        finally:
            if snapshot:
                torch.cuda.memory._record_memory_history(enabled=None)
        logger.warning("%s\ntrace: %s (chrome://tracing, ui.perfetto.dev)", table, trace)


def time_on_cpu(events: Iterable[FunctionEvent], seconds: float, waited: float, in_flight: float) -> dict[str, float]:
    """Split the seconds of a step on a CPU.

    Args:
        events: of torch.profiler, on any thread.
        seconds: of the step; waited: of them, for context-parallel messages; in_flight: while messages travelled.
    """
    spans = [(e.time_range.start, e.time_range.end) for e in events if e.name.startswith(OPERATIONS)]
    computed = max(0.0, covered(spans) / 1e6 - waited)
    return {
        "compute": computed,
        "CP exchange, exposed": waited,
        "CP exchange, hidden (at most)": max(0.0, in_flight - waited),
        "other collectives, waiting and Python": max(0.0, seconds - computed - waited),
    }


def time_on_gpu(events: Iterable[FunctionEvent], seconds: float, waited: float, in_flight: float) -> dict[str, float]:
    """As time_on_cpu on CUDA, from the times of kernels: messages are those of NCCL."""
    # Annotated ranges of torch and FSDP2 span all the kernels inside them.
    kernels = [e for e in events if "CUDA" in str(e.device_type) and not getattr(e, "is_user_annotation", False)]
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in kernels:
        spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    computing, sending, both = covered(spans[False]), covered(spans[True]), covered(spans[True] + spans[False])
    exposed = (both - computing) / 1e6
    return {
        "compute": computing / 1e6,
        "messages, hidden": (computing + sending - both) / 1e6,
        "messages, exposed": exposed,
        "of which CP exchange, in stream time": min(waited, exposed),
        "device idle": max(0.0, seconds - both / 1e6),
    }


def covered(spans: Iterable[Span]) -> float:
    """Length of the union of (start, end) spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
