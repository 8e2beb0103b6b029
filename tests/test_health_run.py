"""Faults in real runs: noticed on every rank in their step, their culprit named, nothing poisoned, and what follows."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.ranks import RankPool
from tests.runs import losses, prepared, write_run
from torchtitan_cp.config.sections import Inject
from torchtitan_cp.trainer import Trainer

LAYOUTS = {
    "fsdp 2": (2, ()),
    "tp 2": (2, ("--parallel.tp=2",)),
    "pp 2": (2, ("--parallel.pp=2", "--training.micro_batch_sequences=2")),
    "cp 2": (2, ("--parallel.cp=2", "--parallel.dp_shard=1")),
    "fsdp 2 x cp 2": (4, ("--parallel.cp=2",)),
    "tp 2 x pp 2, foreach": (4, ("--parallel.tp=2", "--parallel.pp=2", "--optimizer.implementation=foreach")),
}
PLACES = {
    "embedding": Inject(where="embedding"),
    "attention forward": Inject(where="forward", module="attention", kind="inf"),
    "MLP backward": Inject(where="backward", module="feed_forward"),
    "gradient": Inject(where="gradient", module="feed_forward.w2", kind="inf"),
    "data": Inject(where="data"),
}

# Ranks that read the same tokens, where a rank is not alone with them.
SHARING = {
    "tp 2": {0: [0, 1], 1: [0, 1]},
    "pp 2": {0: [0, 1], 1: [0, 1]},
    "tp 2 x pp 2, foreach": {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]},
}


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("health"))


@dataclass
class Seen:
    """What a run went through on one rank, by step.

    Attributes:
        bad: bad steps, in the rank's own view.
        changed: names of what a bad step changed, beside what it was to leave alone.
        logged: warnings.
    """

    bad: list[int] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    findings: dict[int, tuple[str, ...]] = field(default_factory=dict)
    studies: dict[int, dict[str, Any]] = field(default_factory=dict)
    logged: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's weights and everything the optimizers hold, copied."""
    state = {}
    for part, optimizer in zip(trainer.network.parts, trainer.network.optimizers, strict=True):
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
    seen, guarding = Seen(), trainer.guarding
    handler = logging.Handler()
    handler.emit = lambda record: seen.logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchtitan_cp").addHandler(handler)
    gradients, recover, study = guarding.gradients, trainer._recover, guarding.study

    def with_fault(step: int, *arguments: Any, **options: Any) -> Any:
        guarding.injector.settings = faults.get(step, Inject())
        guarding.injector.strikes_here = trainer.world.rank == guarding.injector.settings.rank
        return gradients(step, *arguments, **options)

    def recovering(*arguments: Any) -> None:
        step, before = trainer.progress.step + 1, state_of(trainer)
        seen.bad.append(step)
        seen.findings[step] = arguments[1].findings
        recover(*arguments)
        seen.changed += [f"{name} in step {step}" for name in differing(before, state_of(trainer))]

    def studying(step: int, *arguments: Any) -> Any:
        found = study(step, *arguments)
        seen.studies[step] = found.as_json()
        return found

    guarding.study = studying  # type: ignore[method-assign]
    guarding.gradients = with_fault  # type: ignore[method-assign]
    trainer._recover = recovering  # type: ignore[method-assign]
    trainer.run()
    dist.barrier()
    logging.getLogger("torchtitan_cp").removeHandler(handler)
    text = (trainer.folder / "metrics.jsonl").read_text()
    seen.lines = [json.loads(line) for line in text.splitlines()]
    return seen


def faults_of(layout: str) -> dict[int, Inject]:
    """Each place on the first rank and another, every second step from the third on."""
    faults = []
    for rank in (0, 1):
        for place, fault in PLACES.items():
            if "pp" in layout and place == "embedding" and rank:
                continue
            ranks_of_stage = 2 if layout.startswith("tp 2 x pp") else 1
            layer = rank // ranks_of_stage if "pp" in layout else 1 - rank
            faults.append(replace(fault, rank=rank, layer=layer))
    return {3 + 2 * index: replace(fault, step=3 + 2 * index) for index, fault in enumerate(faults)}


def check_culprit(layout: str, fault: Inject, found: dict[str, Any]) -> None:
    """The study names what was struck, and whom."""
    culprit = found["culprit"]
    named = (culprit["module"], culprit["what"], culprit["direction"], list(found["ranks"]))
    block, rank = f"layers.{fault.layer}", fault.rank
    expected = {
        "embedding": ("tok_embeddings", "output", "forward", [rank]),
        "forward": (f"{block}.attention", "output", "forward", [rank]),
        "backward": (f"{block}.feed_forward", "input gradient", "backward", [rank]),
        "gradient": (f"{block}.feed_forward.w2", "gradient of weight", "backward", [rank]),
        "data": ("data", "labels", "forward", SHARING.get(layout, {}).get(rank, [rank])),
    }
    assert named == expected[fault.where]
    assert found["reproduces"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_anywhere_is_noticed_in_its_step_and_changes_nothing_on_any_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, layout: str
) -> None:
    size, overrides = LAYOUTS[layout]
    faults = faults_of(layout)
    folder = f"--job.dump_folder={run_toml.parent / layout.replace(' ', '-')}"
    stage = ("--curriculum.stages[0].steps=12", "--checkpoint.enable=false")
    for seen in ranks(size)(watched_run, run_toml, faults, folder, *stage, *overrides):
        assert seen.bad == list(faults)
        assert seen.changed == []
        assert [line["step"] for line in seen.lines if line["skipped"]] == list(faults)
        values = [line["loss"] for line in seen.lines if not line["skipped"]]
        assert len(values) == 12
        assert values[-1] < values[0]
        for step, fault in faults.items():
            check_culprit(layout, fault, seen.studies[step])


def poisoned_shard(path: Path, *overrides: str) -> Seen:
    """On a rank: a run in which rank 1's shard of one gradient is ill in step 3, when all ranks have summed it."""
    original = Trainer.gradients

    def gradients(trainer: Trainer, batches: Any) -> Any:
        compute = trainer.network.gradients

        def poisoned(micro_batches: Any) -> Any:
            sums = compute(micro_batches)
            if trainer.progress.step == 2 and trainer.world.rank == 1:
                local(trainer.network.parts[0].layers["0"].attention.wq.weight.grad)[1, 2] = torch.nan  # type: ignore[union-attr, index]
            return sums

        trainer.network.gradients = poisoned  # type: ignore[method-assign]
        try:
            return original(trainer, batches)
        finally:
            trainer.network.gradients = compute  # type: ignore[method-assign]

    Trainer.gradients = gradients  # type: ignore[method-assign]
    try:
        return watched_run(path, {}, *overrides)
    finally:
        Trainer.gradients = original  # type: ignore[method-assign]


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_nan_in_one_ranks_optimizer_input_reaches_no_moment(
    ranks: Callable[[int], RankPool], run_toml: Path, implementation: str
) -> None:
    folder = f"--job.dump_folder={run_toml.parent / ('shard-' + implementation)}"
    for seen in ranks(2)(poisoned_shard, run_toml, folder, f"--optimizer.implementation={implementation}"):
        assert (seen.bad, seen.changed) == ([3], [])
        assert seen.findings[3][0].startswith("rank 1: a weight's gradient in block 0 is nan")


def healthy_steps(path: Path, faults: dict[int, Inject], *overrides: str) -> tuple[list[float], list[int], list[float]]:
    """On a rank: losses of the healthy steps, which text they read, and their learning rates."""
    read: list[int] = []
    trainer = prepared(path, "--health.on_nonfinite=skip", *overrides)
    gradients = trainer.guarding.gradients

    def remembered(step: int, batches: Any, **options: Any) -> Any:
        trainer.guarding.injector.settings = faults.get(step, Inject())
        report = gradients(step, batches, **options)
        if not report.findings:
            read.append(batches[0].numbers[0])
        return report

    trainer.guarding.gradients = remembered  # type: ignore[method-assign]
    trainer.run()
    dist.barrier()
    lines = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
    healthy = [line for line in lines if not line["skipped"]]
    return losses(healthy), read, [line["lr"] for line in healthy]


def test_a_skipped_step_leaves_the_schedule_alone_and_its_text_out(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    stage = ("--curriculum.stages[0].steps=6", "--checkpoint.enable=false")
    whole, numbers, rates = ranks(1)(
        healthy_steps, run_toml, {}, f"--job.dump_folder={run_toml.parent / 'schedule-whole'}", *stage
    )[0]
    faults = {2: Inject(step=2, where="data"), 3: Inject(step=3, where="data")}
    skipping = ranks(1)(
        healthy_steps, run_toml, faults, f"--job.dump_folder={run_toml.parent / 'schedule-skip'}", *stage
    )[0]
    step = numbers[1] - numbers[0]
    assert skipping[1] == [numbers[0], *range(numbers[0] + 3 * step, numbers[0] + 8 * step, step)]
    assert skipping[2] == rates
    assert skipping[0][0] == whole[0]
    assert len(skipping[0]) == 6
