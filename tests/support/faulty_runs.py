"""Runs on ranks with faults in some steps, and what is seen of them on a rank."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.inject import Inject, inject
from tests.support.runs import losses, prepared
from torchtitan_cp.health import recovery
from torchtitan_cp.health.recovery import NonFiniteError
from torchtitan_cp.parallel.pipeline_stages import SPLITS_ANY_BACKWARD
from torchtitan_cp.training.trainer import Trainer

FOUR = "--curriculum.stages[0].global_batch_tokens=512"
TWO_STAGES_A_RANK = ("--parallel.pp=2", "--training.micro_batch_sequences=1", "--model.overrides.n_layers=4")
LAYOUTS = {
    "fsdp 2": (2, ()),
    "tp 2": (2, ("--parallel.tp=2",)),
    "pp 2": (2, ("--parallel.pp=2", "--training.micro_batch_sequences=2", FOUR)),
    "cp 2": (2, ("--parallel.cp=2", "--parallel.dp_shard=1")),
    "fsdp 2 x cp 2": (4, ("--parallel.cp=2",)),
    "tp 2 x pp 2": (4, ("--parallel.tp=2", "--parallel.pp=2")),
    "pp 2, interleaved": (2, (*TWO_STAGES_A_RANK, "--parallel.pp_schedule=interleaved_1f1b")),
    "pp 2, ZBV": (2, (*TWO_STAGES_A_RANK, "--parallel.pp_schedule=zbv_zero_bubble")),
    "experts, cp 2": (2, ("--model.architecture=moe", "--parallel.cp=2", "--parallel.dp_shard=1")),
    # Halves of the MLP's weights are whole blocks of 256 values; of the embedding's two parts only one is.
    "8-bit moments, fsdp 2": (2, ("--optimizer.state=8bit", "--model.overrides.ffn_dim=256")),
}
if not SPLITS_ANY_BACKWARD:  # before torch 2.13
    del LAYOUTS["pp 2, ZBV"]
SHORT = ("--curriculum.stages[0].steps=5", "--checkpoint.enable=false")


@dataclass
class Seen:
    """What a run went through on one rank, by step.

    Attributes:
        bad: bad steps, in the rank's own view.
        changed: names of what a bad step changed, beside what it was to leave alone.
        logged: warnings.
    """

    rank: int
    bad: list[int] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    findings: dict[int, tuple[str, ...]] = field(default_factory=dict)
    diagnoses: dict[int, dict[str, Any]] = field(default_factory=dict)
    logged: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)


def local(x: Tensor) -> Tensor:
    """This rank's shard; torchao's moments as the floats they stand for."""
    shard = x.to_local() if isinstance(x, DTensor) else x
    return shard if type(shard) in (Tensor, nn.Parameter) else shard.dequantize()


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's weights and everything the optimizers hold, copied."""
    state = {}
    for part, optimizer in zip(trainer.model.parts, trainer.model.optimizers, strict=True):
        for name, parameter in part.named_parameters():
            state[name] = local(parameter.detach()).clone()
            moments = optimizer.state.get(parameter, {}).items()
            state |= {f"{kind} of {name}": local(value).clone() for kind, value in moments}
    return state


def differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def watched_run(path: Path, faults: dict[int, Inject], *overrides: str) -> Seen:
    """On a rank: a run with a fault in each of these steps."""
    trainer = prepared(path, "--health.on_nonfinite=skip", *overrides)
    seen = Seen(trainer.world.rank)
    handler = logging.Handler()
    handler.emit = lambda record: seen.logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchtitan_cp").addHandler(handler)
    take, recover = trainer._step, trainer._recover

    def with_fault(*arguments: Any) -> bool:
        inject(trainer, faults.get(trainer.progress.step + 1))
        diagnose = trainer.step_runner.diagnose

        def diagnosing(step: int, *arguments: Any) -> Any:
            found = diagnose(step, *arguments)
            seen.diagnoses[step] = found.as_json()
            return found

        trainer.step_runner.diagnose = diagnosing  # type: ignore[method-assign]
        return take(*arguments)

    def recovering(*arguments: Any) -> None:
        step, before = trainer.progress.step + 1, state_of(trainer)
        seen.bad.append(step)
        seen.findings[step] = arguments[1].findings
        recover(*arguments)
        seen.changed += [f"{name} in step {step}" for name in differing(before, state_of(trainer))]

    trainer._step, trainer._recover = with_fault, recovering  # type: ignore[method-assign]
    trainer.run()
    dist.barrier()
    logging.getLogger("torchtitan_cp").removeHandler(handler)
    text = (trainer.folder / "metrics.jsonl").read_text()
    seen.lines = [json.loads(line) for line in text.splitlines()]
    return seen


def healthy_steps(path: Path, faults: dict[int, Inject], *overrides: str) -> tuple[list[float], list[int], list[float]]:
    """On a rank: losses of the healthy steps, which text they read, and their learning rates."""
    read: list[int] = []
    trainer = prepared(path, "--health.on_nonfinite=skip", *overrides)
    take = trainer._step

    def remembered(stage: Any, batches: Any) -> bool:
        inject(trainer, faults.get(trainer.progress.step + 1))
        batch = next(batches)
        healthy = take(stage, iter([batch]))
        if healthy:
            read.append(batch[0].numbers[0])
        return healthy

    trainer._step = remembered  # type: ignore[method-assign]
    with patch.object(recovery, "MAX_SKIPS", 2):
        trainer.run()
    dist.barrier()
    lines = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
    healthy = [line for line in lines if not line["skipped"]]
    return losses(healthy), read, [line["lr"] for line in healthy]


def ending(path: Path, faults: dict[int, Inject], *overrides: str) -> tuple[str, list[dict[str, Any]]]:
    """On a rank: how a run with a fault in each of these steps ends, and its records."""
    trainer, end = prepared(path, "--health.on_nonfinite=skip", *overrides), "trained"
    take = trainer._step

    def with_fault(*arguments: Any) -> bool:
        inject(trainer, faults.get(trainer.progress.step + 1))
        return take(*arguments)

    trainer._step = with_fault  # type: ignore[method-assign]
    try:
        with patch.object(recovery, "MAX_SKIPS", 1):
            trainer.run()
    except NonFiniteError as error:
        end = str(error)
    dist.barrier()
    return end, [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
