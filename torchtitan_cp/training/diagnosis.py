"""Studying a bad step: it is run again with every module watched, and what it began with is named and kept."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.config.sections import Compile
from torchtitan_cp.data.batches.loader import MicroBatch
from torchtitan_cp.health import StepReport
from torchtitan_cp.health.bundle import Bundle, Capture, pack_arguments
from torchtitan_cp.health.trace import (
    DATA,
    STEP,
    WEIGHT,
    Event,
    Magnitudes,
    Trace,
    find_invalid_tokens,
    find_nonfinite_weight,
    first_grown,
    first_of,
    modules_that_run,
    unit_of,
)
from torchtitan_cp.parallel import wrap_blocks
from torchtitan_cp.runtime import World
from torchtitan_cp.training.model import ParallelModel

Run = Callable[[AbstractContextManager[Any]], StepReport]  # runs the step within a context


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What repeating a bad step has shown, the same on every rank.

    Attributes:
        said: in words.
        reproduces: it was bad again.
        culprit: the first ill event of all ranks; None where none was found.
        ranks: on which it is the first.
        place: of its token, as `row`, `local_token`, `sequence`, `global_token`, `document`; empty where it has none.
        times: of a spike, how many times as large as in a healthy step; else 0.
    """

    said: str
    reproduces: bool
    culprit: Event | None = None
    ranks: tuple[int, ...] = ()
    place: dict[str, int] = dataclasses.field(default_factory=dict)
    times: float = 0.0

    @property
    def recoverable(self) -> bool:
        """Whether the next step may be well: not with an ill weight."""
        return self.culprit is None or self.culprit.order[0] != WEIGHT

    def as_json(self) -> dict[str, Any]:
        culprit = self.culprit.as_json() if self.culprit else None
        known = {"said": self.said, "reproduces": self.reproduces, "culprit": culprit, "ranks": self.ranks}
        return {**known, "times": self.times, **self.place}


def diagnose(model: ParallelModel, world: World, micro_batches: tuple[MicroBatch, ...], run: Run) -> Diagnosis:
    """Repeat a step and find the first ill number of all ranks. Collective.

    Args:
        run: (context) -> what the step is, run again within it, behind the faults that are made on purpose; its
            gradients are forgotten.
    """
    batches = [{"tokens": batch.tokens, "labels": batch.labels} for batch in micro_batches]
    event = find_nonfinite_weight(model.parts) or find_invalid_tokens(batches, model.args.vocab_size, IGNORED)
    trace = Trace(named_parts(model), model.token_loss)
    with uncompiled(model):
        reproduces = bool(run(trace).findings)
    if event is None and reproduces:
        event = trace.first
    place = locate(event, micro_batches, model) if event else {}
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, (event, place))
    first = first_of([other for other, _ in found])
    compiled = model.config.compile.enable
    if first is None:
        said = "no single number of a module is not finite" if reproduces else _gone(compiled)
        return Diagnosis(said, reproduces)
    culprit, ranks = first
    place = found[ranks[0]][1]
    said = _describe(culprit, ranks, place) + (_again(compiled) if reproduces else "")
    return Diagnosis(said, reproduces, culprit, tuple(ranks), place)


def diagnose_spike(
    model: ParallelModel, world: World, micro_batches: tuple[MicroBatch, ...], run: Run, run_healthy: Run
) -> Diagnosis:
    """Repeat a step whose numbers are finite and far too large, and find which of them is so first. Collective.

    Args:
        run: as for `study`.
        run_healthy: the same with the newest healthy step, which says how large numbers are.
    """
    spiked, usual = (Magnitudes(named_parts(model), model.token_loss) for _ in range(2))
    with uncompiled(model):
        run_healthy(usual)
        reproduces = bool(run(spiked).spikes)
    compiled = model.config.compile.enable
    if not reproduces:
        return Diagnosis(_gone(compiled, "has no spike"), reproduces)
    grown: list[Any] = [None] * world.size
    dist.all_gather_object(grown, spiked.growth(usual))
    first = first_grown(grown)
    if first is None:
        return Diagnosis(f"no module's numbers stand out, so look at its text{_again(compiled)}", reproduces)
    times, culprit, ranks = first
    places: list[Any] = [None] * world.size
    dist.all_gather_object(places, locate(culprit, micro_batches, model) if world.rank in ranks else {})
    place = places[ranks[0]]
    return Diagnosis(
        _describe(culprit, ranks, place, times) + _again(compiled), reproduces, culprit, tuple(ranks), place, times
    )


def _again(compiled: bool) -> str:
    return "; it comes again when the step is repeated" + (" without torch.compile" if compiled else "")


def _gone(compiled: bool, what: str = "is finite") -> str:
    maybe = ", or of torch.compile, which the repeat goes without" if compiled else ""
    return f"repeated, the step {what}: a fault of the hardware, or a race{maybe}"


def _describe(event: Event, ranks: list[int], place: dict[str, int], times: float = 0.0) -> str:
    on = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
    if event.order[0] == WEIGHT:
        return f"the {event.what} of {event.module} is {event.value} on {on} at {list(event.index)} of its shard"
    if event.order[0] == DATA:
        what = f"one of the {event.what} is {event.value}, which is no token, on {on}"
    else:
        what = f"it begins on {on} in {event.direction}: the {event.what} of {event.module} is {event.value}"
        what += f", {times:.3g} times what it was in a healthy step" if times else ""
    if not place:
        return f"{what}, micro-batch {event.micro_batch}"
    return (
        f"{what}, micro-batch {event.micro_batch}, at token {place['global_token']} of sequence {place['sequence']} "
        f"(local token {place['local_token']} of row {place['row']}, document {place['document']})"
    )


def named_parts(model: ParallelModel) -> Iterator[tuple[int, str, nn.Module]]:
    """This rank's parts as Trace wants them."""
    numbers = model.layers.of_rank(model.meshes.pp.get_local_rank())
    return ((number, "", part) for number, part in zip(numbers, model.parts, strict=True))


@contextmanager
def uncompiled(model: ParallelModel) -> Iterator[None]:
    """Blocks as they are without torch.compile, whose insides no hook sees."""
    if not model.config.compile.enable:
        yield
        return
    layers = [layer for part in model.parts for layer in part.layers.values()]  # type: ignore[operator]
    kept = [{name: vars(layer)[name] for name in ("forward", "mlp") if name in vars(layer)} for layer in layers]
    for part in model.parts:
        wrap_blocks(part, model.activation, Compile(enable=False), model.device.type)
    try:
        yield
    finally:
        for layer, replaced in zip(layers, kept, strict=True):
            for name in ("forward", "mlp"):
                vars(layer).pop(name, None)
            vars(layer).update(replaced)


def locate(event: Event, micro_batches: tuple[MicroBatch, ...], model: ParallelModel) -> dict[str, int]:
    """Where the token of an ill value is; empty where a weight, or a gradient of one, has none."""
    if event.order[0] == WEIGHT or "of" in event.what.split():
        return {}
    batch = micro_batches[event.micro_batch]
    rows, tokens = batch.tokens.shape
    tp, tp_rank = model.meshes.degrees.tp, model.mesh.get_local_rank("tp")
    shape, index = event.shape, event.index
    if shape[:2] == (rows, tokens):
        row, token = index[:2]
    elif shape[:2] == (rows, tokens // tp):
        row, token = index[0], index[1] + tp_rank * shape[1]
    elif shape[:1] == (rows * tokens,):
        row, token = divmod(index[0], tokens)
    else:
        return {}
    plan = batch.plan
    position = int(plan.positions[token])
    documents = plan.mask.documents(plan.sequence_length)
    spans = documents[row if len(documents) > 1 else 0]
    document = next((number for number, (start, stop) in enumerate(spans) if start <= position < stop), -1)
    sequence = batch.numbers[row] if batch.numbers else -1
    return {
        "row": row,
        "local_token": token,
        "sequence": sequence,
        "global_token": position,
        "document": document,
    }


def keep(
    found: Diagnosis, model: ParallelModel, micro_batches: tuple[MicroBatch, ...], run: Run, about: dict[str, Any]
) -> Bundle:
    """The tensors of what a study found, whole whatever ranks they are spread over. Collective.

    Args:
        about: what else is to be in the report.
    """
    event, config = found.culprit, model.config
    batch = micro_batches[max(0, event.micro_batch) if event else 0]
    plan = batch.plan
    report = {
        **about,
        **found.as_json(),
        "unit": None,
        "arguments": [],
        "architecture": config.model.architecture,
        "sizes": dataclasses.asdict(model.args),
        "compute_dtype": config.training.compute_dtype,
        "loss_chunk_tokens": config.training.loss_chunk_tokens,
        "z_loss": config.training.z_loss,
        "seq_len": plan.sequence_length,
        "document_lengths": plan.mask.document_lengths,
        "windows": sorted(batch.plans),
        "torch": torch.__version__,
    }
    ids = {"tokens": batch.tokens, "labels": batch.labels}
    tensors = {name: plan.unshard(x.to(model.device)) for name, x in ids.items()}
    if event and event.order[0] != DATA and unit_of(event):
        unit = report["unit"] = unit_of(event)
        module = _module(model, unit)
        if event.order[0] == STEP:
            capture = Capture(module, event.micro_batch) if module else None
            with uncompiled(model):
                run(capture or nullcontext())
            if capture:
                report["arguments"], inputs = _whole_inputs(model, unit, capture, batch)
                tensors |= inputs
        if module:
            weights = {name: x.full_tensor() for name, x in module.named_parameters() if isinstance(x, DTensor)}
            tensors |= {f"weight.{name}": x for name, x in weights.items()}
    return Bundle(report, tensors)


def _module(model: ParallelModel, name: str) -> nn.Module | None:
    """A module by its name in the whole model, if this rank has it."""
    if name == "loss":
        return model.token_loss if hasattr(model.parts[-1], "output") else None
    return modules_that_run(model.parts).get(name)


def _whole_inputs(
    model: ParallelModel, unit: str, capture: Capture, batch: MicroBatch
) -> tuple[list[Any], dict[str, Tensor]]:
    """The arguments of a module and the gradients of its outputs, as one rank would have them."""
    mesh, tp = model.meshes.tp, model.meshes.degrees.tp
    rows, tokens = batch.tokens.shape

    def whole(x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            x = x.full_tensor()
        elif mesh and x.shape[:2] == (rows, tokens // tp):
            x = DTensor.from_local(x, mesh, [Shard(1)], run_check=False).full_tensor()
        if x.shape[:2] == (rows, tokens):
            return batch.plan.unshard(x, 1)
        if rows > 1 and x.shape[:1] == (rows * tokens,):
            return batch.plan.unshard(x.unflatten(0, (rows, tokens)), 1).flatten(0, 1)
        return batch.plan.unshard(x, 0) if x.shape[:1] == (tokens,) else x

    inputs = list(capture.inputs)
    if unit == "loss":
        # A rank of tensor parallelism has some rows of it.
        output: Any = model.parts[-1].output
        inputs[1] = output.weight.full_tensor().to(inputs[0].dtype)
    described, tensors = pack_arguments(inputs, lambda x: x if unit == "loss" and x is inputs[1] else whole(x))
    dealt_out = mesh is not None and _outputs_are_dealt_out(capture.module)
    for place, gradient in capture.output_gradients.items():
        if dealt_out and mesh and not isinstance(gradient, DTensor):
            gradient = DTensor.from_local(gradient, mesh, [Shard(gradient.ndim - 1)], run_check=False)
        tensors[f"output_gradient.{place}"] = whole(gradient)
    return described, tensors


def _outputs_are_dealt_out(module: nn.Module) -> bool:
    """Whether a linear layer's rank has some of its outputs, all of the tokens."""
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and isinstance(weight, DTensor) and weight.placements[-1].is_shard(0)
