"""Where the bad values of a step begin: it is run again with the inputs, outputs and gradients of every module watched.

All ranks that hold a part of the model run its modules in the same order, so events of different ranks can be compared
by their place in that order: within a micro-batch, the first bad event of any rank is the cause of all others.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from torchtitan_cp.attention.local_shard import local_tensor
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.health.monitor import StepReport

WEIGHT, DATA, STEP = range(3)
FORWARD, BACKWARD = "forward", "backward"
MIN_GROWTH = 4.0  # of a spike: a tensor that grew less, compared with a healthy step, does not stand out

# (step, micro-batches, context) -> the report of a step that is run again within the context; nothing is kept of it.
RunStep = Callable[[int, Sequence[Any], AbstractContextManager[Any]], StepReport]


@dataclass(frozen=True)
class Event:
    """A number of a step on one rank, plain JSON: the first non-finite value of a tensor, or its largest.

    Attributes:
        order: in the step, which is the same on all ranks.
        micro_batch: of the rank, from 0; -1: of none.
        direction: forward or backward.
        module: by its name in the whole model; `loss` is the loss.
        what: `output`, `input`, `input gradient`, `output gradient`, `parameter` or `gradient of` with a name; a number
            follows where there are several.
        value: nan, inf or -inf, or the absolute value; of a token its id.
        shape: of the tensor on this rank; index: of the value.
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
    def where(self) -> tuple[str, str, str]:
        """Direction, module, and which of its tensors."""
        return self.direction, self.module, self.what

    @property
    def culprit_module(self) -> str:
        """Name of the smallest module that made the bad value from good ones, empty if that is the whole model.

        A bad value that enters a module was made by the module around it, between its children.
        """
        entered = self.what.startswith("input" if self.direction == FORWARD else "output")
        return self.module.rpartition(".")[0] if entered else self.module


class ModuleTrace:
    """Records every tensor that enters or leaves a module in a step, and its gradient.

    Every value is read on the host, so a step takes longer. Forwards that activation checkpointing repeats are ignored.
    Modules must not be compiled, as hooks inside them would not run.

    Args:
        parts: (number of the pipeline stage, prefix of its names, module) of each part here; the loss is one.
        keep: a module and a micro-batch whose `inputs` and `output_gradients` are kept.

    Attributes:
        seen: (largest absolute value, infinite where one is not finite; what it is of) of every tensor.
        inputs, named: arguments of the module to keep by position and by name, tensors detached.
        output_gradients: by position among its outputs.
    """

    def __init__(self, parts: Iterable[tuple[int, str, nn.Module]], keep: tuple[nn.Module, int] | None = None) -> None:
        self.parts, self.keep = list(parts), keep
        self.seen = list[tuple[float, Event]]()
        self.inputs, self.named = list[Any](), dict[str, Any]()
        self.output_gradients: dict[int, Tensor] = {}
        self._gradient: Tensor | None = None
        self._weights: set[int] = set()
        self._forwards: Counter[tuple[int, str]] = Counter()
        self._backward_micro_batch = 0
        self._counts: Counter[tuple[int, int, str]] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward and backward within."""
        with ExitStack() as self._hooks:
            for number, prefix, part in self.parts:
                for name, module in part.named_modules(prefix=prefix):
                    before, after = (partial(see, (number, prefix), name) for see in (self._before, self._after))
                    self._hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                    self._hooks.enter_context(module.register_forward_hook(after))
            yield

    def _before(self, part: tuple[int, str], name: str, module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        if is_recomputing():
            return
        if name == part[1]:  # the part itself, whose forwards come in the order of the micro-batches
            self._forwards[part] += 1
        self._see_all(part, name, "input", (*inputs, *named.values()), keep=False)
        if self.keep == (module, self._forwards[part] - 1):
            self.inputs, self.named = tree_map_only(Tensor, lambda x: x.detach().clone(), (list(inputs), named))
        for own, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and id(weight) not in self._weights:
                self._weights.add(id(weight))
                see = partial(self._see, part[0], None, BACKWARD, name, f"gradient of {own}")
                self._hooks.enter_context(weight.register_hook(see))

    def _after(self, part: tuple[int, str], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not is_recomputing():
            outputs = output if isinstance(output, tuple) else (output,)
            self._see_all(part, name, "output", outputs, keep=self.keep == (module, self._forwards[part] - 1))

    def _see_all(self, part: tuple[int, str], name: str, what: str, values: tuple[Any, ...], keep: bool) -> None:
        number, micro_batch = part[0], self._forwards[part] - 1
        for position, x in enumerate(values):
            if isinstance(x, Tensor) and x.is_floating_point():
                label = what if position == 0 else f"{what} {position}"
                self._see(number, micro_batch, FORWARD, name, label, x)
                if x.requires_grad:
                    x.register_hook(partial(self._see_gradient, number, micro_batch, name, f"{label} gradient"))
                if x.requires_grad and keep:
                    x.register_hook(partial(self._keep_gradient, position))

    def _keep_gradient(self, position: int, gradient: Tensor) -> None:
        self.output_gradients[position] = gradient.clone()

    def _see_gradient(self, number: int, micro_batch: int, name: str, what: str, gradient: Tensor) -> None:
        self._backward_micro_batch = micro_batch
        if gradient is not self._gradient:
            self._gradient = gradient
            self._see(number, micro_batch, BACKWARD, name, what, gradient)
        elif self.seen and what.startswith("input") and self.seen[-1][1].what.startswith("output"):
            # A tensor may be the output of one module and the input of the next, which made its gradient.
            value, event = self.seen[-1]
            self.seen[-1] = (value, replace(event, module=name, what=what))

    def _see(self, number: int, micro_batch: int | None, direction: str, name: str, what: str, x: Tensor) -> None:
        if micro_batch is None:  # of a weight's gradient, which follows those of the tensors
            micro_batch = self._backward_micro_batch
        key = (number, micro_batch, direction)
        self._counts[key] += 1
        # Forward runs up the pipeline stages and backward down.
        stage = number if direction == FORWARD else -number
        order = (STEP, micro_batch, int(direction == BACKWARD), stage, self._counts[key])
        if found := largest_value(x):
            self.seen.append((found[0], Event(order, micro_batch, direction, name, what, *found[1:])))

    def growth_over(self, healthy: "ModuleTrace") -> list[tuple[float, Event]]:
        """(growth, what) of each tensor that grew more than all before it, in the order of the step.

        Args:
            healthy: of a healthy step of the same shape. Growth is how many times larger a tensor is than there,
                infinite where it is not finite.
        """
        before = {event.where: value for value, event in sorted(healthy.seen, key=lambda each: each[0])}  # the largest
        most, grown = 0.0, []
        for value, event in sorted(self.seen, key=lambda each: each[1].order):
            # What the healthy step did not have, or had as 0, does not count as growth.
            growth = value if math.isinf(value) else value / (before.get(event.where) or math.inf)
            if growth > most:
                most = growth
                grown.append((growth, event))
        return grown


def is_recomputing() -> bool:
    """Whether this forward runs within a backward."""
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def largest_value(x: Tensor) -> tuple[float, str, tuple[int, ...], tuple[int, ...]] | None:
    """(size, value, shape, index) of the largest value of this rank's shard; of its first non-finite one if it has one.

    None of an empty shard. The size is the absolute value, or infinite.
    """
    own = local_tensor(x).detach()
    if not own.numel():
        return None
    flat = own.flatten()
    low, high = torch.aminmax(flat)  # which pass NaN on
    bad = not (low.isfinite() and high.isfinite())
    largest = flat.argmax() if high >= -low else flat.argmin()
    at = (~flat.isfinite()).to(torch.uint8).argmax() if bad else largest
    index = tuple(int(number) for number in torch.unravel_index(at, own.shape))
    value = float(own[index])
    size = math.inf if bad else abs(value)
    return size, str(value) if bad else f"{size:.3g}", tuple(own.shape), index


def find_nonfinite_weight(parts: Iterable[nn.Module], prefix: str = "") -> Event | None:
    """The first weight of which this rank's shard has a non-finite value; the prefix is that of the parts' names."""
    for part in parts:
        for number, (name, parameter) in enumerate(part.named_parameters(prefix=prefix)):
            found = largest_value(parameter)
            if found and math.isinf(found[0]):
                module, _, own = name.rpartition(".")
                return Event((WEIGHT, number), -1, FORWARD, module, f"parameter {own}", *found[1:])
    return None


def find_invalid_tokens(batches: Iterable[dict[str, Tensor]], vocabulary: int) -> Event | None:
    """The first token or label of this rank that the vocabulary does not have.

    Args:
        batches: `tokens` and `labels` `[B, S/cp]` of each micro-batch.
        vocabulary: V.
    """
    for number, batch in enumerate(batches):
        for what, ids in batch.items():
            bad = ((ids < 0) | (ids >= vocabulary)) & ~((ids == IGNORED) & (what == "labels"))
            if bad.any():
                index = tuple(bad.nonzero()[0].tolist())
                value = str(int(ids[index]))
                return Event((DATA, number), number, FORWARD, "data", what, value, tuple(ids.shape), index)
    return None


def find_origin(grown: Iterable[list[tuple[float, Event]]]) -> tuple[float, Event, list[int]] | None:
    """Where bad values begin: the first tensor whose growth is at least the square root of the greatest growth.

    Numbers differ from step to step, and what follows a spike inherits its growth; growth multiplies, so the root lies
    between the two. Non-finite values have infinite growth, so the first of them is the origin.

    Args:
        grown: of each rank, from ModuleTrace.growth_over.

    Returns:
        (growth, what, the ranks where it is the first); None if nothing stands out.
    """
    rows = list(grown)
    most = max((growth for row in rows for growth, _ in row), default=0.0)
    if most < MIN_GROWTH:
        return None
    first = [next((each for each in row if each[0] >= most**0.5), None) for row in rows]
    order = min(each[1].order for each in first if each)
    ranks = [rank for rank, each in enumerate(first) if each and each[1].order == order]
    growth, event = first[ranks[0]]  # type: ignore[misc]
    return growth, event, ranks


@dataclass(frozen=True)
class Diagnosis:
    """What repeating a bad step has shown, the same on every rank.

    Attributes:
        summary: a sentence for the log.
        reproduces: the step was bad again.
        culprit: the first bad event of all ranks, if one was found.
        ranks: on which it is the first.
        token: where it is, as `row`, `local_token`, `sequence`, `global_token`, `document`; empty if it has none.
        times: of a spike, how many times larger than in a healthy step; else 0.
    """

    summary: str
    reproduces: bool
    culprit: Event | None = None
    ranks: tuple[int, ...] = ()
    token: dict[str, int] = field(default_factory=dict)
    times: float = 0.0

    @property
    def weights_finite(self) -> bool:
        """Whether no weight has a non-finite value, with which the next step would be bad too."""
        return self.culprit is None or self.culprit.order[0] != WEIGHT

    def as_json(self) -> dict[str, Any]:
        """As a bundle's report has it."""
        known = asdict(self)
        return {"said": known.pop("summary"), **known.pop("token"), **known}


@dataclass(frozen=True)
class Diagnoser:
    """Finds the module, rank and token with which the bad values of a step begin.

    Attributes:
        parts: (number of the pipeline stage, module) of each part of the model here.
        loss: the module of the loss, which the last part calls.
        vocabulary: V.
        tp_mesh: of tensor parallelism; None without it.
        device: of this rank.
        run_step: runs a step again.
        compiled: the step runs without torch.compile when it is run again.
    """

    parts: Sequence[tuple[int, nn.Module]]
    loss: nn.Module
    vocabulary: int
    tp_mesh: DeviceMesh | None
    device: torch.device
    run_step: RunStep
    compiled: bool

    def diagnose(
        self, step: int, micro_batches: Sequence[Any], report: StepReport, healthy: Sequence[Any]
    ) -> Diagnosis:
        """Run a bad step again and find the first bad value of all ranks. Collective.

        Args:
            step: its number.
            micro_batches: of the step, each with `tokens`, `labels`, `plan` and `numbers` of its sequences.
            report: of the step.
            healthy: micro-batches of the newest healthy step, which a spike is compared with; empty if there is none.
        """
        if not (report.findings or healthy):
            return Diagnosis("there is no healthy step to compare it with yet, so its module is not known", False)
        usual, trace = ModuleTrace(self.watched), ModuleTrace(self.watched)
        if not report.findings:
            self.run_step(0, healthy, usual.watching())  # no step has this number, so no fault is injected
        again = self.run_step(step, micro_batches, trace.watching())
        reproduces = bool(again.findings or (again.spikes and not report.findings))
        ids = [{"tokens": batch.tokens, "labels": batch.labels} for batch in micro_batches]
        event = find_nonfinite_weight(part for _, part in self.parts)
        event = event or find_invalid_tokens(ids, self.vocabulary)
        grown = [(math.inf, event)] if event else trace.growth_over(usual) if reproduces else []
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, grown)
        origin = find_origin(gathered)
        repeated = "; it comes again when the step is repeated" + " without torch.compile" * self.compiled
        if origin is None and reproduces:
            finite = "every number that enters or leaves a module is finite"
            what = finite if report.findings else "no module's numbers stand out, so look at its text"
            return Diagnosis(what + repeated, True)
        if origin is None:
            what = "is finite" if report.findings else "has no spike"
            but = ", or torch.compile, which the repeat runs without" * self.compiled
            return Diagnosis(f"repeated, the step {what}: a hardware fault, or a race{but}", False)
        growth, culprit, ranks = origin
        token = [self._locate(culprit, micro_batches) if dist.get_rank() == ranks[0] else {}]
        dist.broadcast_object_list(token, ranks[0])
        times = 0.0 if math.isinf(growth) else growth
        summary = _describe_culprit(culprit, ranks, token[0], times) + repeated * reproduces
        return Diagnosis(summary, reproduces, culprit, tuple(ranks), token[0], times)

    @property
    def watched(self) -> list[tuple[int, str, nn.Module]]:
        """The parts and the loss, as ModuleTrace takes them."""
        return [*((number, "", part) for number, part in self.parts), (self.parts[-1][0], "loss", self.loss)]

    def _locate(self, event: Event, micro_batches: Sequence[Any]) -> dict[str, int]:
        """Where the token of a bad value is; empty for a weight or its gradient."""
        if event.order[0] == WEIGHT or "of" in event.what.split():
            return {}
        batch = micro_batches[event.micro_batch]
        rows, tokens = batch.tokens.shape
        tp, tp_rank = (self.tp_mesh.size(), self.tp_mesh.get_local_rank()) if self.tp_mesh else (1, 0)
        # Numbers of the tokens as the tensor may have them: all, those of this tensor-parallel rank, in one dim.
        numbers = torch.arange(rows * tokens).view(rows, tokens)
        layouts = (numbers, numbers.chunk(tp, 1)[tp_rank], numbers.flatten())
        own = next((x for x in layouts if x.shape == event.shape[: x.ndim]), None)
        if own is None:
            return {}
        row, token = divmod(int(own[event.index[: own.ndim]]), tokens)
        position = int(batch.plan.positions[token])
        documents = batch.plan.mask.documents(batch.plan.sequence_length)
        spans = documents[row if len(documents) > 1 else 0]
        return {
            "row": row,
            "local_token": token,
            "sequence": batch.numbers[row] if batch.numbers else -1,
            "global_token": position,
            "document": next((number for number, (start, stop) in enumerate(spans) if start <= position < stop), -1),
        }


def _describe_culprit(event: Event, ranks: list[int], token: dict[str, int], times: float) -> str:
    on = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
    if event.order[0] == WEIGHT:
        return f"the {event.what} of {event.module} is {event.value} on {on} at {list(event.index)} of its shard"
    if event.order[0] == DATA:
        what = f"one of the {event.what} is {event.value}, which is not in the vocabulary, on {on}"
    else:
        what = f"it begins on {on} in {event.direction}: the {event.what} of {event.module} is {event.value}"
        what += f", {times:.3g} times its value in a healthy step" if times else ""
    what += f", micro-batch {event.micro_batch}"
    if token:
        what += (
            f", at token {token['global_token']} of sequence {token['sequence']} "
            f"(local token {token['local_token']} of row {token['row']}, document {token['document']})"
        )
    return what
