"""Bundles hold the tensors of the module in which a bad step began; replay runs that module again on one process."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map, tree_map_only

from torchtitan_cp.attention import AttentionMask, Plan, make_plan
from torchtitan_cp.config import UserError
from torchtitan_cp.config.json_types import Json, JsonObject
from torchtitan_cp.health.diagnosis import (
    BACKWARD,
    DATA,
    STEP,
    Batch,
    Diagnoser,
    Diagnosis,
    Event,
    ModuleTrace,
    find_invalid_tokens,
    find_nonfinite_weight,
)

logger = logging.getLogger(__name__)

REPORT, TENSORS = "report.json", "tensors.safetensors"
Arguments = tuple[list[Json], dict[str, Json]]  # of a module, by position and by name
PLANS = "plans"  # stands for a block's argument with its attention plans
MIN_FRACTION = 0.9  # of a spike's value that a replay must reach, as another order of summation changes it a little


class RunSettings(TypedDict):
    """What the report of a bundle says of the run.

    Attributes:
        findings: non-finite values or spikes of the step.
        architecture, sizes: of the model; see `registry.sizes_of`.
        lora: keys of [lora]; None without it.
        loss_chunk_tokens, z_loss, logit_scale, logit_softcap: of the loss.
    """

    findings: Sequence[str]
    architecture: str
    sizes: JsonObject
    lora: dict[str, Any] | None
    compute_dtype: str
    loss_chunk_tokens: int
    z_loss: float
    logit_scale: float
    logit_softcap: float


class Report(RunSettings):
    """The report of a bundle, which also has all fields of the diagnosis.

    Attributes:
        module: name of the culprit; None: no single module is the cause.
        arguments, named: of the module, with names of tensors, PLANS and plain values.
        document_lengths: of each row; None: one document.
    """

    summary: str
    module: str | None
    culprit: dict[str, Any]  # fields of an Event
    times: float
    arguments: list[Json]
    named: dict[str, Json]
    seq_len: int
    document_lengths: Sequence[Sequence[int]] | None
    windows: list[int]


@dataclass
class Bundle:
    """A bad step on disk, as safetensors and JSON.

    Attributes:
        report: as JSON.
        tensors: by name: `input.N`, `output_gradient.N`, `weight.NAME`, `tokens`, `labels`.
    """

    report: Report
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Create the folder and write both files."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: x.detach().cpu().contiguous() for name, x in self.tensors.items()}, folder / TENSORS)
        with suppress(OSError):  # some file systems have no permissions
            (folder / TENSORS).chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read it
        (folder / REPORT).write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Bundle":
        """Read what `write` wrote.

        Raises:
            UserError: a file is missing or damaged.
        """
        try:
            report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
            if missing := {"summary", "module"} - report.keys():
                raise KeyError(", ".join(sorted(missing)))
            return cls(report, load_file(folder / TENSORS))
        except Exception as error:  # from JSON, safetensors or the disk
            raise UserError(
                f"{folder} does not hold the bundle of a bad step ({type(error).__name__}: {error})",
                fix="give a folder that a run wrote under health/, e.g. outputs/run/health/step-120",
            ) from None

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names begin with a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}


# Writing a bundle --------------------------------------------------------------------------------------------


def save_bundle(
    diagnoser: Diagnoser[Batch],
    found: Diagnosis,
    step: int,
    micro_batches: Sequence[Batch],
    about: RunSettings,
    folder: Path,
) -> Diagnosis:
    """Write the inputs and weights of the culprit's module, gathered from all ranks. Collective.

    Args:
        found: diagnosis of the step.
        micro_batches: this rank's share of the step, of which the culprit's one is written.
        about: more entries of the report.

    Returns:
        the diagnosis; its summary now names the folder if the bundle could be written.
    """
    event = found.culprit
    batch = micro_batches[max(0, event.micro_batch) if event else 0]
    plan = batch.plan
    name = event.culprit_module if event and event.order[0] != DATA else ""
    tensors = {name: plan.unshard(getattr(batch, name).to(diagnoser.device)) for name in ("tokens", "labels")}
    report: dict[str, object] = {
        **about,
        **found.as_json(),
        "step": step,
        "module": name or None,
        "arguments": [],
        "named": {},
        "seq_len": plan.sequence_length,
        "document_lengths": plan.mask.document_lengths,
        "windows": sorted(batch.plans),
        "torch": torch.__version__,
    }
    if event and name:
        modules = dict(pair for _, prefix, part in diagnoser.watched for pair in part.named_modules(prefix=prefix))
        module = modules.get(name)
        if event.order[0] == STEP:
            trace = ModuleTrace(diagnoser.watched, keep=(module, event.micro_batch) if module else None)
            diagnoser.run_step(micro_batches, trace.watching())
            if module and (trace.inputs or trace.keywords):
                (report["arguments"], report["named"]), inputs = _whole_arguments(diagnoser, module, trace, batch)
                tensors |= inputs
        weights = (*module.named_parameters(), *module.named_buffers()) if module else ()
        tensors |= {f"weight.{name}": _gathered(x, diagnoser) for name, x in weights}
    written = torch.ones((), device=diagnoser.device)
    if dist.get_rank() == (found.ranks[0] if found.ranks else 0):
        try:
            Bundle(cast(Report, report), tensors).write(folder)
        except Exception as error:  # the other ranks wait
            logger.error("the tensors of step %d cannot be written to %s: %s", step, folder, error)
            written.zero_()
    dist.all_reduce(written, dist.ReduceOp.MIN)
    return replace(found, summary=f"{found.summary}; its tensors are in {folder}") if written else found


def _gathered(x: Tensor, diagnoser: Diagnoser[Batch]) -> Tensor:
    """A whole parameter or buffer. NCCL cannot send from host memory, where fsdp_cpu_offload keeps the shards."""
    on_device = x.to(diagnoser.device)
    return on_device.full_tensor() if isinstance(on_device, DTensor) else on_device


def _whole_arguments(
    diagnoser: Diagnoser[Batch], module: nn.Module, trace: ModuleTrace, batch: Batch
) -> tuple[Arguments, dict[str, Tensor]]:
    """The arguments of a module as JSON; their tensors and the gradients of its outputs, gathered from all ranks."""
    mesh = diagnoser.tp_mesh
    rows, tokens = batch.tokens.shape

    def whole(x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            x = x.full_tensor()
        elif mesh and x.shape[:2] == (rows, tokens // mesh.size()):
            x = DTensor.from_local(x, mesh, [Shard(1)], run_check=False).full_tensor()
        if x.shape[:2] == (rows, tokens):
            return batch.plan.unshard(x, 1)
        if rows > 1 and x.shape[:1] == (rows * tokens,):
            return batch.plan.unshard(x.unflatten(0, (rows, tokens)), 1).flatten(0, 1)
        return batch.plan.unshard(x, 0) if x.shape[:1] == (tokens,) else x

    described, tensors = pack_arguments((trace.inputs, trace.keywords), whole)
    if module is diagnoser.loss:
        # A tensor-parallel rank has only some rows of the output matrix.
        hidden, output = trace.inputs[0], diagnoser.parts[-1][1].output
        assert isinstance(hidden, Tensor)
        tensors["input.1"] = _gathered(output.weight, diagnoser).to(hidden.dtype)
    weight = getattr(module, "weight", None)
    # If a linear layer is split by its outputs, a rank has all tokens, but only some outputs.
    split = isinstance(module, nn.Linear) and isinstance(weight, DTensor) and weight.placements[-1].is_shard(0)
    for position, gradient in trace.output_gradients.items():
        if split and mesh and not isinstance(gradient, DTensor):
            gradient = DTensor.from_local(gradient, mesh, [Shard(gradient.ndim - 1)], run_check=False)
        tensors[f"output_gradient.{position}"] = whole(gradient)
    return described, tensors


def pack_arguments(
    arguments: tuple[list[object], dict[str, object]], whole: Callable[[Tensor], Tensor]
) -> tuple[Arguments, dict[str, Tensor]]:
    """A module's arguments as JSON, and their tensors.

    Args:
        whole: (tensor of this rank) -> tensor of the whole sequence.
    """
    tensors: dict[str, Tensor] = {}

    def describe(x: object) -> Json:
        if isinstance(x, Tensor):
            name = f"input.{len(tensors)}"
            tensors[name] = whole(x)
            return name
        if _are_plans(x):
            return PLANS
        return x if isinstance(x, (bool, int, float)) else None

    described: Arguments = tree_map(describe, arguments, is_leaf=_are_plans)
    return described, tensors


def _are_plans(x: object) -> bool:
    """Whether this argument is a layer's plans by window."""
    return isinstance(x, dict) and any(isinstance(key, int) for key in x)


# Replaying a bundle -------------------------------------------------------------------------------------------


def replay(bundle: Bundle, build: Callable[[Bundle], nn.Module]) -> Event | None:
    """Run the module of a bundle again.

    Args:
        build: makes the module with the weights it had.

    Returns:
        its first non-finite value, or for a spike the same tensor's largest value if it is as large; None if the bad
        value is not reproduced.

    Raises:
        UserError: the bundle has no module.
    """
    report, name = bundle.report, bundle.report["module"]
    ids = {name: x for name, x in bundle.tensors.items() if name in ("tokens", "labels")}
    vocabulary = report["sizes"]["vocab_size"]
    assert isinstance(vocabulary, int)
    if event := find_invalid_tokens([ids], vocabulary):
        return event
    if name is None:
        raise UserError(
            "the bundle holds no module: the step was healthy when it was repeated, or no single module is the cause",
            fix="read its report.json; a step that is healthy when repeated points to the hardware, or to a race",
        )
    module = build(bundle)
    if event := find_nonfinite_weight([module], name):
        return event
    values = {**bundle.tensors, PLANS: _make_plans(report)}
    arguments, keywords = tree_map_only(str, values.__getitem__, (report["arguments"], report.get("named", {})))
    for x in (*arguments, *keywords.values()):
        if isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    trace = ModuleTrace([(0, name, module)])
    with trace.watching():
        outputs = module(*arguments, **keywords)
        gradients = {int(position): x for position, x in bundle.under("output_gradient.").items()}
        if report["culprit"]["direction"] == BACKWARD:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward([outputs[position] for position in gradients], list(gradients.values()))
    if not report["times"]:
        return next((event for value, event in trace.observed if math.isinf(value)), None)
    # Bundles of the version before this one call the quantity `what`.
    spike = Event(**{"quantity" if name == "what" else name: value for name, value in report["culprit"].items()})
    least = MIN_FRACTION * float(spike.value)
    return next((event for value, event in trace.observed if value >= least and event.location == spike.location), None)


def _make_plans(report: Report) -> dict[int, Plan]:
    """The plans of the sequences on one rank, by window."""
    lengths = report["document_lengths"]
    rows = None if lengths is None else tuple(tuple(row) for row in lengths)
    mask = AttentionMask(document_lengths=rows)
    return {window: make_plan(report["seq_len"], mask=mask.windowed(window)) for window in {0, *report["windows"]}}
