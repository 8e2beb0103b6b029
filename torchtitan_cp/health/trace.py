"""Where the first number that is not finite arises: every module's inputs, outputs and gradients of a step, watched.

All ranks that have a part of the model run its modules in the same order, so events can be compared by their place in
that order: within a micro-batch the first ill event of any rank is the cause of all others.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WEIGHT, DATA, STEP = range(3)
FORWARD, BACKWARD = "forward", "backward"
STANDS_OUT = 4.0  # times as large as in a healthy step


@dataclass(frozen=True)
class Event:
    """A number that is not finite, or far too large, on one rank; plain JSON.

    Attributes:
        order: what comes first is the smallest, on whichever rank.
        micro_batch: of the rank, from 0; -1: of none.
        direction: forward or backward.
        module: by its name in the whole model; `loss` is the loss.
        what: of the module is ill: `output`, `input`, `input gradient`, `output gradient`, `parameter`,
            `gradient of weight`, with a number or name behind it where there are several.
        value: nan, inf or -inf; of a spike, the number.
        shape: of the tensor on this rank; index: of its first ill value, or of its largest.
    """

    order: tuple[int, ...]
    micro_batch: int
    direction: str
    module: str
    what: str
    value: str
    shape: tuple[int, ...]
    index: tuple[int, ...]

    @property
    def place(self) -> tuple[str, str, str]:
        """Direction, module, and what it is of the module."""
        return self.direction, self.module, self.what

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Trace:
    """Watches one step. Use it as a context around forward and backward.

    Every value is looked at on the host, so a step takes longer. What activation checkpointing computes again is not
    looked at again. Blocks must not be compiled: their insides would not be seen.

    Args:
        parts: (number among the pipeline's stages, prefix of its names, module) of each part here.
        loss: the module of the loss, called within the forward of the last of the parts.

    Attributes:
        first: the first ill event; None while all is well.
    """

    def __init__(self, parts: Iterable[tuple[int, str, nn.Module]], loss: nn.Module | None = None) -> None:
        self.parts, self.loss = list(parts), loss
        self.first: Event | None = None
        self._first_gradient: Tensor | None = None
        self._handles: list[Any] = []
        self._weights: set[int] = set()
        self._micro_batch: dict[int, int] = {}
        self._backward_micro_batch = 0
        self._seen: Counter[tuple[int, int, str]] = Counter()

    def __enter__(self) -> "Trace":
        for number, prefix, part in self.parts:
            self._handles.append(part.register_forward_pre_hook(partial(self._begin, number), prepend=True))
            self._watch(number, prefix, part)
        if self.loss is not None:
            self._watch(self.parts[-1][0], "loss", self.loss)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch(self, number: int, prefix: str, part: nn.Module) -> None:
        for name, module in part.named_modules(prefix=prefix):
            self._handles.append(module.register_forward_pre_hook(partial(self._before, number, name)))
            self._handles.append(module.register_forward_hook(partial(self._after, number, name)))

    def _begin(self, number: int, part: nn.Module, inputs: Any) -> None:
        if not _recomputes():
            # A part's forwards come in the order of the micro-batches.
            self._micro_batch[number] = self._micro_batch.get(number, -1) + 1

    def _before(self, number: int, name: str, module: nn.Module, inputs: Any) -> None:
        if _recomputes():
            return
        micro_batch = self._micro_batch[number]
        self._pass(number, micro_batch, name, "input", inputs)
        for own, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and id(weight) not in self._weights:
                self._weights.add(id(weight))
                see = partial(self._see_weight_gradient, number, name, f"gradient of {own}")
                self._handles.append(weight.register_hook(see))

    def _after(self, number: int, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not _recomputes():
            outputs = output if isinstance(output, tuple) else (output,)
            self._pass(number, self._micro_batch[number], name, "output", outputs)

    def _pass(self, number: int, micro_batch: int, name: str, what: str, values: tuple[Any, ...]) -> None:
        """Look at tensors that go in or out, and later at their gradients."""
        for place, x in enumerate(values):
            if isinstance(x, Tensor) and x.is_floating_point():
                label = what if place == 0 else f"{what} {place}"
                self._see(number, micro_batch, FORWARD, name, label, x)
                if x.requires_grad:
                    x.register_hook(partial(self._see_gradient, number, micro_batch, name, f"{label} gradient"))

    def _see_gradient(self, number: int, micro_batch: int, name: str, what: str, gradient: Tensor) -> None:
        self._backward_micro_batch = micro_batch
        before = self.first
        self._see(number, micro_batch, BACKWARD, name, what, gradient)
        if self.first is not before:
            self._first_gradient = gradient
        elif before and gradient is self._first_gradient and "output" in before.what and what.startswith("input"):
            # A tensor may be the output of one module and the input of the next, which made its gradient.
            self.first = Event(**{**before.as_json(), "module": name, "what": what})

    def _see_weight_gradient(self, number: int, name: str, what: str, gradient: Tensor) -> None:
        self._see(number, self._backward_micro_batch, BACKWARD, name, what, gradient)

    def _see(self, number: int, micro_batch: int, direction: str, name: str, what: str, x: Tensor) -> None:
        key = (number, micro_batch, direction)
        self._seen[key] += 1
        # Forward goes up the stages and backward down.
        stage = number if direction == FORWARD else -number
        order = (STEP, micro_batch, int(direction == BACKWARD), stage, self._seen[key])
        self._look(order, micro_batch, direction, name, what, x)

    def _look(self, order: tuple[int, ...], micro_batch: int, direction: str, name: str, what: str, x: Tensor) -> None:
        if self.first is None or order < self.first.order:
            found = find_nonfinite(x)
            if found:
                self.first = Event(order, micro_batch, direction, name, what, *found)


class Magnitudes(Trace):
    """Watches a step that is finite, for how large its numbers are.

    Attributes:
        seen: (largest absolute value, what it is of) of every tensor of the step.
    """

    seen: list[tuple[float, Event]]

    def __enter__(self) -> "Magnitudes":
        self.seen = []
        super().__enter__()
        return self

    @torch.no_grad()
    def _look(self, order: tuple[int, ...], micro_batch: int, direction: str, name: str, what: str, x: Tensor) -> None:
        own = (x.to_local() if isinstance(x, DTensor) else x).detach()
        if own.numel():
            place = own.abs().argmax()
            value = float(own.flatten()[place].abs())
            index = tuple(int(number) for number in torch.unravel_index(place, own.shape))
            event = Event(order, micro_batch, direction, name, what, f"{value:.3g}", tuple(own.shape), index)
            self.seen.append((value, event))

    def largest(self) -> dict[tuple[str, str, str], float]:
        """The largest value of all micro-batches, by direction, module and what it is of the module."""
        found: dict[tuple[str, str, str], float] = {}
        for value, event in self.seen:
            found[event.place] = max(value, found.get(event.place, 0.0))
        return found

    def growth(self, usual: "Magnitudes") -> list[tuple[float, Event]]:
        """(how many times as large as usual, what) in the order of the step, of what outgrows all before it.

        Args:
            usual: of a healthy step of the same shape.
        """
        largest, outgrown = usual.largest(), []
        most = 0.0
        for value, event in sorted(self.seen, key=lambda each: each[1].order):
            times = value / largest[event.place] if largest.get(event.place) else 0.0
            if times > most:
                most = times
                outgrown.append((times, event))
        return outgrown


def _recomputes() -> bool:
    """Whether this forward runs within a backward."""
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def find_nonfinite(x: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """(value, shape, index) of the first value of this rank's part that is not finite."""
    own = (x.to_local() if isinstance(x, DTensor) else x).detach()
    ill = ~own.isfinite()
    if not ill.any():
        return None
    place = int(ill.flatten().to(torch.uint8).argmax())
    index = tuple(int(number) for number in torch.unravel_index(torch.tensor(place), own.shape))
    return str(own[index].item()), tuple(own.shape), index


def modules_that_run(parts: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Modules of this rank by their names in the whole model.

    A part that closes with an output tied to the embedding has that too, for its weight, and does not run it.
    """
    return {
        name: module
        for part in parts
        for name, module in part.named_modules()
        if part.opens or not name.startswith("tok_embeddings")
    }


def find_nonfinite_weight(parts: Iterable[nn.Module]) -> Event | None:
    """The first weight of which this rank's shard is ill."""
    for part in parts:
        for place, (name, parameter) in enumerate(part.named_parameters()):
            if found := find_nonfinite(parameter):
                module, _, own = name.rpartition(".")
                return Event((WEIGHT, place), -1, FORWARD, module, f"parameter {own}", *found)
    return None


def find_invalid_tokens(batches: Iterable[dict[str, Tensor]], vocabulary: int, ignored: int) -> Event | None:
    """The first token or label of this rank that is none.

    Args:
        batches: `tokens` and `labels` `[B, S/cp]` of each micro-batch.
        vocabulary: V; ignored: the label that counts nothing.
    """
    for number, batch in enumerate(batches):
        for what, ids in batch.items():
            ill = ((ids < 0) | (ids >= vocabulary)) & ~((ids == ignored) & (what == "labels"))
            if ill.any():
                index = tuple(ill.nonzero()[0].tolist())
                value = str(int(ids[index]))
                return Event((DATA, number), number, FORWARD, "data", what, value, tuple(ids.shape), index)
    return None


def first_of(events: Iterable[Event | None]) -> tuple[Event, list[int]] | None:
    """The first event of all ranks, and the ranks on which it is the first.

    Args:
        events: of each rank, in rank order.
    """
    known = [(event.order, rank, event) for rank, event in enumerate(events) if event]
    if not known:
        return None
    order = min(known)[0]
    ranks = [rank for other, rank, _ in known if other == order]
    return next(event for other, _, event in known if other == order), ranks


def first_grown(grown: Iterable[list[tuple[float, Event]]]) -> tuple[float, Event, list[int]] | None:
    """Where a spike arises: the first tensor whose growth is as great as the root of the greatest, at least.

    Numbers of one step differ from those of another, and what follows a spike carries its growth on: the root lies
    between the two, as both are factors.

    Args:
        grown: of each rank, from Magnitudes.growth.

    Returns:
        (how many times as large as usual, what, the ranks where it is the first); None if nothing stands out.
    """
    known = [list(each) for each in grown]
    most = max((times for each in known for times, _ in each), default=0.0)
    if most < STANDS_OUT:
        return None
    over = [next(((times, event) for times, event in each if times >= most**0.5), None) for each in known]
    first = first_of(None if each is None else each[1] for each in over)
    assert first is not None, "the greatest growth is over its own root"
    event, ranks = first
    times = next(times for each in over if each is not None for times, other in [each] if other.order == event.order)
    return times, event, ranks


def unit_of(event: Event) -> str:
    """Name of the smallest module that made the ill value out of healthy ones, empty if that is the whole model.

    What comes into a module ill was made by the one around it, between its parts.
    """
    came_in = event.what.startswith("input") if event.direction == FORWARD else event.what.startswith("output")
    return event.module.rpartition(".")[0] if came_in else event.module
