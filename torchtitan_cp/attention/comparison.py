"""Compares a step of a model on ranks with the same step in one process, layer by layer.

`record_step` runs a step one way and keeps its loss, numbers of each layer, gradients and memory, whole and on the
host. `compare` makes a row of each. The doctor and --verify-parity are two such comparisons: they record other numbers
of a layer, allow other differences, and read the rows in their own way.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

# (layer, kind of its numbers), e.g. ("layers.0.attention", "attention output"); the loss is of no layer.
Quantity = tuple[str, str]
LOSS: Quantity = ("", "loss")
GRADIENTS = "gradients"
ROUNDING_ALLOWANCE = 1.5
Result = TypeVar("Result")


@dataclass
class Trace:
    """What one step gave.

    Attributes:
        events: numbers of the layers, in the order in which they were computed; which ones, the recorder decides.
        gradients: each layer's as one vector, fp32; empty where gradients are disabled.
        loss: in `record_step` a rank's share of it, whose sum over the ranks is the loss.
        peak_bytes: the memory that the step adds, on the rank where that is most.
        error: what the step raised, if the recorder catches it.
    """

    events: dict[Quantity, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    peak_bytes: int = 0
    error: str = ""

    @property
    def quantities(self) -> dict[Quantity, Tensor]:
        """All that is compared: the loss, the events, and the gradients."""
        gradients = {(layer, GRADIENTS): vector for layer, vector in self.gradients.items()}
        return {LOSS: torch.tensor(self.loss), **self.events, **gradients}


AnyTrace = TypeVar("AnyTrace", bound=Trace)


class ModelRun(NamedTuple):
    """A way to run the model.

    Attributes:
        parts: the modules on this rank; several, or not all, only under pipeline parallelism.
        step: (position whose token is changed in the first sequence, or None) -> share of the loss. A forward, and a
            backward if gradients are enabled.
        gradients: returns full gradients by name on the host, and frees the model's. Collective on ranks.
        measure_peak: starts measuring memory; the returned function gives the peak beyond what was held, in bytes.
    """

    parts: Sequence[nn.Module]
    step: Callable[[int | None], float | Tensor]
    gradients: Callable[[], dict[str, Tensor]]
    measure_peak: Callable[[], Callable[[], int]]


def record_step(
    run: ModelRun,
    record: Callable[[Sequence[nn.Module]], AbstractContextManager[AnyTrace]],
    gather: Callable[[AnyTrace], dict[Quantity, Tensor]] | None = None,
    changed: int | None = None,
) -> AnyTrace:
    """Run a step and record it.

    Args:
        record: (parts) -> a context whose trace gets the events of the step.
        gather: on ranks, the events of whole sequences from a rank's trace. Collective over all ranks of the job, as is
            then this function. None: this process has run the whole sequences.
        changed: see ModelRun.step.
    """
    peak_bytes = run.measure_peak()
    with record(run.parts) as trace:
        trace.loss = float(run.step(changed))
    trace.peak_bytes = peak_bytes()
    if gather:
        own = trace.loss, trace.peak_bytes, trace.error
        by_rank = [own] * dist.get_world_size()
        dist.all_gather_object(by_rank, own)
        losses, peaks, errors = zip(*by_rank, strict=True)
        trace.loss, trace.peak_bytes, trace.error = sum(losses), max(peaks), next(filter(None, errors), "")
        trace.events = gather(trace)
    trace.events = {quantity: x.float().cpu() for quantity, x in trace.events.items()}
    if torch.is_grad_enabled() and not trace.error:
        trace.gradients = by_layer(run.gradients())
    return trace


def by_layer(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One vector per layer. A layer's name goes up to its number, or up to the first dot."""
    layers: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        numbered = re.match(r"(.*?\.\d+)\.|([^.]*)", name)
        layers.setdefault(numbered[0].rstrip("."), []).append(gradient.flatten())  # type: ignore[index]
    return {layer: torch.cat(parts) for layer, parts in layers.items()}


@dataclass(frozen=True)
class Row:
    """One compared quantity.

    Attributes:
        quantity: its name: the loss, or the numbers or gradients of a layer.
        difference: relative L2 difference of the ranks from one process.
        largest: the largest difference over the largest value.
        allowed: the largest `difference` that still counts as equal.
    """

    quantity: str
    difference: float
    largest: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.allowed


def compare(
    ranks: Mapping[Quantity, Tensor],
    single: Mapping[Quantity, Tensor],
    tolerance: float,
    rounded: Mapping[Quantity, Tensor] | None = None,
) -> dict[Quantity, Row]:
    """A row for each quantity of one process, in their order. What the ranks lack differs infinitely.

    Args:
        tolerance: a relative L2 difference that is always allowed.
        rounded: one process in the dtype of the ranks, where `single` is in fp32. The ranks may differ from fp32
            ROUNDING_ALLOWANCE times as much as it does.
    """
    rows = {}
    for quantity, want in single.items():
        rounding = difference(rounded[quantity], want) if rounded else 0.0
        got, name = ranks.get(quantity), ", ".join(filter(None, reversed(quantity)))
        relative, largest = difference(got, want), math.inf
        if got is not None and relative < math.inf:
            largest = ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)).item()
        rows[quantity] = Row(name, relative, largest, max(ROUNDING_ALLOWANCE * rounding, tolerance))
    return rows


def difference(got: Tensor | None, want: Tensor) -> float:
    """Relative L2 difference; infinite where a number or a shape is wrong."""
    if got is None or got.shape != want.shape:
        return math.inf
    error = ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()
    return math.inf if math.isnan(error) else error


def describe_peaks(single: int, ranks: int) -> str:
    """A line on the memory that the step adds both ways, in bytes."""
    return f"peak memory of the step: {single / 2**20:,.0f} MiB on one process, {ranks / 2**20:,.0f} MiB a rank"


def on_rank_0(compute: Callable[[], Result]) -> Result:
    """What rank 0 computes, on every rank. Collective over all ranks of the job."""
    result: list[Any] = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]
