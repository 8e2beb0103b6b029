"""Where the bad values of a step begin: it is run again with the inputs, outputs and gradients of every module watched.

All ranks that hold a part of the model run its modules in the same order, so the order of their events can be compared:
within a micro-batch, the first bad event of any rank is the cause of all others.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from torchtitan_cp.attention import Plan
from torchtitan_cp.attention.local_shard import local_tensor
from torchtitan_cp.config.contract import LanguageModel
from torchtitan_cp.config.json_types import JsonObject
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.health.monitor import StepReport

WEIGHT, DATA, STEP = range(3)
FORWARD, BACKWARD = "forward", "backward"
MIN_GROWTH = 4.0  # a tensor that grew less than this since a healthy step does not explain a spike


class WatchedBatch(Protocol):
    """What a micro-batch says of its tokens; see data.batches.micro_batches.MicroBatch."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def plans(self) -> dict[int, Plan]: ...
    @property
    def numbers(self) -> tuple[int, ...]: ...


Batch = TypeVar("Batch", bound=WatchedBatch)
# (micro-batches, context) -> report. Runs a step again within the context and discards its gradients.
RunStep = Callable[[Sequence[Batch], AbstractContextManager[None]], StepReport]


@dataclass(frozen=True)
class Event:
    """A number of a step on one rank, plain JSON: the first non-finite value of a tensor, or its largest.

    Attributes:
        order: sorts the events of a step in the order in which they happen; it is the same on all ranks.
        micro_batch: number on this rank, from 0; -1 for a weight.
        direction: forward or backward.
        module: name in the whole model; `loss` is the loss.
        quantity: `output`, `input`, `input gradient`, `output gradient`, `parameter NAME` or `gradient of NAME`; a
            number follows if the module has several.
        value: nan, inf or -inf, or the absolute value; for a token its id.
        shape: of the tensor on this rank; index: of the value.
    """

    order: tuple[int, ...]
    micro_batch: int
    direction: str
    module: str
    quantity: str
    value: str
    shape: tuple[int, ...]
    index: tuple[int, ...]

    @property
    def location(self) -> tuple[str, str, str]:
        """Direction, module, and which of its tensors."""
        return self.direction, self.module, self.quantity

    @property
    def culprit_module(self) -> str:
        """Name of the smallest module that made the bad value from good ones; empty if that is the whole model.

        If a bad value enters a module, the module around it made the value between its children.
        """
        entered = self.quantity.startswith("input" if self.direction == FORWARD else "output")
        return self.module.rpartition(".")[0] if entered else self.module


class ModuleTrace:
    """Records the largest value of every tensor that enters or leaves a module in a step, and of its gradient.

    The host reads every value, so a step takes longer. Forwards that activation checkpointing repeats are ignored.
    Modules must not be compiled, as hooks inside them would not run.

    Args:
        parts: (number of the pipeline stage, prefix of its names, module) of each part on this rank; the loss is one.
        keep: a module and a micro-batch whose `inputs`, `keywords` and `output_gradients` are kept.

    Attributes:
        observed: (largest absolute value, or infinity if a value is not finite; event) of every tensor.
        inputs, keywords: positional and keyword arguments of the module to keep; tensors are detached.
        output_gradients: by position among its outputs.
    """

    def __init__(self, parts: Iterable[tuple[int, str, nn.Module]], keep: tuple[nn.Module, int] | None = None) -> None:
        self.parts, self.keep = list(parts), keep
        self.observed = list[tuple[float, Event]]()
        self.inputs, self.keywords = list[object](), dict[str, object]()
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
                    before, after = (partial(hook, (number, prefix), name) for hook in (self._before, self._after))
                    self._hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                    self._hooks.enter_context(module.register_forward_hook(after))
            yield

    def _before(
        self,
        part: tuple[int, str],
        name: str,
        module: nn.Module,
        inputs: tuple[object, ...],
        keywords: dict[str, object],
    ) -> None:
        if is_recomputing():
            return
        if name == part[1]:  # the part itself runs once per micro-batch, in their order
            self._forwards[part] += 1
        self._observe_all(part, name, "input", (*inputs, *keywords.values()), keep=False)
        if self.keep == (module, self._forwards[part] - 1):
            self.inputs, self.keywords = tree_map_only(Tensor, lambda x: x.detach().clone(), (list(inputs), keywords))
        for weight_name, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and id(weight) not in self._weights:
                self._weights.add(id(weight))
                observe = partial(self._observe, part[0], None, BACKWARD, name, f"gradient of {weight_name}")
                self._hooks.enter_context(weight.register_hook(observe))

    def _after(self, part: tuple[int, str], name: str, module: nn.Module, inputs: object, output: object) -> None:
        if not is_recomputing():
            outputs = output if isinstance(output, tuple) else (output,)
            self._observe_all(part, name, "output", outputs, keep=self.keep == (module, self._forwards[part] - 1))

    def _observe_all(
        self, part: tuple[int, str], name: str, quantity: str, values: tuple[object, ...], keep: bool
    ) -> None:
        number, micro_batch = part[0], self._forwards[part] - 1
        for position, x in enumerate(values):
            if isinstance(x, Tensor) and x.is_floating_point():
                label = quantity if position == 0 else f"{quantity} {position}"
                self._observe(number, micro_batch, FORWARD, name, label, x)
                if x.requires_grad:
                    x.register_hook(partial(self._observe_gradient, number, micro_batch, name, f"{label} gradient"))
                if x.requires_grad and keep:
                    x.register_hook(partial(self._keep_gradient, position))

    def _keep_gradient(self, position: int, gradient: Tensor) -> None:
        self.output_gradients[position] = gradient.clone()

    def _observe_gradient(self, number: int, micro_batch: int, name: str, quantity: str, gradient: Tensor) -> None:
        self._backward_micro_batch = micro_batch
        if gradient is not self._gradient:
            self._gradient = gradient
            self._observe(number, micro_batch, BACKWARD, name, quantity, gradient)
        elif self.observed and quantity.startswith("input") and self.observed[-1][1].quantity.startswith("output"):
            # If a tensor is the output of one module and the input of the next, the next one made its gradient.
            value, event = self.observed[-1]
            self.observed[-1] = (value, replace(event, module=name, quantity=quantity))

    def _observe(
        self, number: int, micro_batch: int | None, direction: str, name: str, quantity: str, x: Tensor
    ) -> None:
        if micro_batch is None:  # the gradient of a weight belongs to the micro-batch that runs backward
            micro_batch = self._backward_micro_batch
        key = (number, micro_batch, direction)
        self._counts[key] += 1
        # Forward runs up the pipeline stages and backward down.
        stage = number if direction == FORWARD else -number
        order = (STEP, micro_batch, int(direction == BACKWARD), stage, self._counts[key])
        if largest := largest_value(x):
            self.observed.append((largest[0], Event(order, micro_batch, direction, name, quantity, *largest[1:])))

    def growth_over(self, healthy: "ModuleTrace") -> list[tuple[float, Event]]:
        """(growth, event) of each tensor that grew more than all before it, in the order of the step.

        Args:
            healthy: trace of a healthy step of the same shape. Growth is the ratio of a tensor's largest value to its
                largest value there; it is infinite if a value is not finite.
        """
        by_size = sorted(healthy.observed, key=lambda pair: pair[0])
        usual = {event.location: value for value, event in by_size}  # the largest of all micro-batches
        most, grown = 0.0, []
        for value, event in sorted(self.observed, key=lambda pair: pair[1].order):
            # A tensor that the healthy step lacks, or that was 0 there, does not count as growth.
            growth = value if math.isinf(value) else value / (usual.get(event.location) or math.inf)
            if growth > most:
                most = growth
                grown.append((growth, event))
        return grown


def is_recomputing() -> bool:
    """Whether this forward runs within a backward."""
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def largest_value(x: Tensor) -> tuple[float, str, tuple[int, ...], tuple[int, ...]] | None:
    """(size, value, shape, index) of the largest value in this rank's shard, or of its first non-finite value.

    The size is the absolute value, or infinity. Returns None for an empty shard.
    """
    shard = local_tensor(x).detach()
    if not shard.numel():
        return None
    flat = shard.flatten()
    low, high = torch.aminmax(flat)  # both are NaN if a value is
    bad = not (low.isfinite() and high.isfinite())
    largest = flat.argmax() if high >= -low else flat.argmin()
    position = (~flat.isfinite()).to(torch.uint8).argmax() if bad else largest
    index = tuple(int(number) for number in torch.unravel_index(position, shard.shape))
    value = float(shard[index])
    size = math.inf if bad else abs(value)
    return size, str(value) if bad else f"{size:.3g}", tuple(shard.shape), index


def find_nonfinite_weight(parts: Iterable[nn.Module], prefix: str = "") -> Event | None:
    """The first weight whose shard on this rank has a non-finite value; the prefix is put before the parts' names."""
    for part in parts:
        for number, (name, parameter) in enumerate(part.named_parameters(prefix=prefix)):
            largest = largest_value(parameter)
            if largest and math.isinf(largest[0]):
                module, _, weight_name = name.rpartition(".")
                return Event((WEIGHT, number), -1, FORWARD, module, f"parameter {weight_name}", *largest[1:])
    return None


def find_invalid_tokens(batches: Iterable[dict[str, Tensor]], vocabulary: int) -> Event | None:
    """The first token or label of this rank that is not in the vocabulary.

    Args:
        batches: `tokens` and `labels` `[B, S/cp]` of each micro-batch.
        vocabulary: V.
    """
    for number, batch in enumerate(batches):
        for name, ids in batch.items():
            bad = ((ids < 0) | (ids >= vocabulary)) & ~((ids == IGNORED) & (name == "labels"))
            if bad.any():
                index = tuple(bad.nonzero()[0].tolist())
                value = str(int(ids[index]))
                return Event((DATA, number), number, FORWARD, "data", name, value, tuple(ids.shape), index)
    return None


def find_origin(grown: Iterable[list[tuple[float, Event]]]) -> tuple[float, Event, list[int]] | None:
    """Where bad values begin: the first tensor whose growth is at least the square root of the greatest growth.

    Values differ a little from step to step, and tensors after a spike inherit its growth. Growth multiplies, so the
    square root separates the two. Non-finite values have infinite growth, so the first of them is the origin.

    Args:
        grown: the result of ModuleTrace.growth_over on each rank.

    Returns:
        (growth, event, the ranks on which it comes first); None if nothing stands out.
    """
    candidates = [(growth, event, rank) for rank, row in enumerate(grown) for growth, event in row]
    most = max((growth for growth, _, _ in candidates), default=0.0)
    if most < MIN_GROWTH:
        return None
    large = [candidate for candidate in candidates if candidate[0] >= most**0.5]
    growth, origin, _ = min(large, key=lambda candidate: candidate[1].order)
    return growth, origin, [rank for _, event, rank in large if event.order == origin.order]


@dataclass(frozen=True)
class Diagnosis:
    """What repeating a bad step has shown; it is the same on every rank.

    Attributes:
        summary: a sentence for the log.
        reproduces: the step was bad again.
        culprit: the first bad event of all ranks, if there is one.
        ranks: the ranks on which it comes first.
        token: its token, as `row`, `local_token`, `sequence`, `global_token`, `document`; empty if it has none.
        times: how many times larger a spike is than in a healthy step; 0 for a non-finite value.
    """

    summary: str
    reproduces: bool
    culprit: Event | None = None
    ranks: tuple[int, ...] = ()
    token: dict[str, int] = field(default_factory=dict)
    times: float = 0.0

    @property
    def weights_finite(self) -> bool:
        """Whether all weights are finite; if one is not, the next step will be bad too."""
        return self.culprit is None or self.culprit.order[0] != WEIGHT

    def as_json(self) -> JsonObject:
        """The diagnosis by the keys of a bundle's report."""
        values = asdict(self)
        return {**values.pop("token"), **values}


@dataclass(frozen=True)
class Diagnoser(Generic[Batch]):
    """Finds the module, rank and token with which the bad values of a step begin.

    Attributes:
        parts: (number of the pipeline stage, module) of each part of the model on this rank.
        loss: the module of the loss, which the last part calls.
        vocabulary: V.
        tp_mesh: of tensor parallelism; None without it.
        device: where values of ranks are compared.
        run_step: runs a step again, always without torch.compile.
        compiled: whether the run itself uses torch.compile.
    """

    parts: Sequence[tuple[int, LanguageModel]]
    loss: nn.Module
    vocabulary: int
    tp_mesh: DeviceMesh | None
    device: torch.device
    run_step: RunStep[Batch]
    compiled: bool

    def diagnose(self, micro_batches: Sequence[Batch], report: StepReport, healthy: Sequence[Batch]) -> Diagnosis:
        """Run a bad step again and find the first bad value of all ranks. Collective.

        Args:
            micro_batches: of the step, each with `tokens`, `labels`, `plan` and the `numbers` of its sequences.
            report: what the step was found bad by: non-finite values, else spikes.
            healthy: micro-batches of the newest healthy step, with which a spike is compared; empty if there is none.
        """
        if not (report.findings or healthy):
            return Diagnosis("there is no healthy step to compare it with yet, so its module is not known", False)
        usual, trace = ModuleTrace(self.watched), ModuleTrace(self.watched)
        if not report.findings:
            self.run_step(healthy, usual.watching())
        again = self.run_step(micro_batches, trace.watching())
        reproduces = bool(again.findings or (again.spikes and not report.findings))
        ids = [{"tokens": batch.tokens, "labels": batch.labels} for batch in micro_batches]
        event = find_nonfinite_weight(part for _, part in self.parts)
        event = event or find_invalid_tokens(ids, self.vocabulary)
        grown = [(math.inf, event)] if event else trace.growth_over(usual) if reproduces else []
        gathered = [grown] * dist.get_world_size()
        dist.all_gather_object(gathered, grown)
        origin = find_origin(gathered)
        repeated = "; it comes again when the step is repeated" + " without torch.compile" * self.compiled
        if origin is None and reproduces:
            finite = "every number that enters or leaves a module is finite"
            verdict = finite if report.findings else "no module's numbers stand out, so look at its text"
            return Diagnosis(verdict + repeated, True)
        if origin is None:
            verdict = "is finite" if report.findings else "has no spike"
            compiler = ", or torch.compile, which the repeat runs without" * self.compiled
            return Diagnosis(f"repeated, the step {verdict}: a hardware fault, or a race{compiler}", False)
        growth, culprit, ranks = origin
        token = [self._locate(culprit, micro_batches) if dist.get_rank() == ranks[0] else {}]
        dist.broadcast_object_list(token, ranks[0])
        times = 0.0 if math.isinf(growth) else growth
        summary = _describe_culprit(culprit, ranks, token[0], times) + repeated * reproduces
        return Diagnosis(summary, reproduces, culprit, tuple(ranks), token[0], times)

    @property
    def watched(self) -> list[tuple[int, str, nn.Module]]:
        """The parts and the loss, in the form that ModuleTrace takes."""
        return [*((number, "", part) for number, part in self.parts), (self.parts[-1][0], "loss", self.loss)]

    def _locate(self, event: Event, micro_batches: Sequence[Batch]) -> dict[str, int]:
        """The token that a bad value belongs to; empty for a weight or its gradient."""
        if event.order[0] == WEIGHT or "of" in event.quantity.split():
            return {}
        batch = micro_batches[event.micro_batch]
        rows, tokens = batch.tokens.shape
        tp, tp_rank = (self.tp_mesh.size(), self.tp_mesh.get_local_rank()) if self.tp_mesh else (1, 0)
        # A tensor may have all tokens, the share of this tensor-parallel rank, or all tokens in one dim.
        numbers = torch.arange(rows * tokens).view(rows, tokens)
        layouts = (numbers, numbers.chunk(tp, 1)[tp_rank], numbers.flatten())
        layout = next((x for x in layouts if x.shape == event.shape[: x.ndim]), None)
        if layout is None:
            return {}
        row, token = divmod(int(layout[event.index[: layout.ndim]]), tokens)
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
        return f"the {event.quantity} of {event.module} is {event.value} on {on} at {list(event.index)} of its shard"
    if event.order[0] == DATA:
        origin = f"one of the {event.quantity} is {event.value}, which is not in the vocabulary, on {on}"
    else:
        origin = f"it begins on {on} in {event.direction}: the {event.quantity} of {event.module} is {event.value}"
        origin += f", {times:.3g} times its value in a healthy step" if times else ""
    origin += f", micro-batch {event.micro_batch}"
    if token:
        origin += (
            f", at token {token['global_token']} of sequence {token['sequence']} "
            f"(local token {token['local_token']} of row {token['row']}, document {token['document']})"
        )
    return origin
