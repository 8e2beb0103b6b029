"""Faults in real runs: noticed on every rank in their step, their culprit named, nothing poisoned, and what follows."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.deep import deep_rows
from tests.support.doctor import write_family
from tests.support.inject import Inject, inject, replay_with_fault
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.runs import TINY, losses, prepared, train, write_run
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.weights import open_saved_model
from torchtitan_cp.cli.replay import build, main
from torchtitan_cp.data.batches.micro_batches import read_step
from torchtitan_cp.health.diagnosis import Diagnoser
from torchtitan_cp.health.monitor import StepReport
from torchtitan_cp.health.recovery import NonFiniteError
from torchtitan_cp.health.replay import Bundle, replay
from torchtitan_cp.parallel.pipeline_stages import SPLITS_ANY_BACKWARD
from torchtitan_cp.runtime import watchdog as failure
from torchtitan_cp.training.model import ParallelModel
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
SHORT = ("--curriculum.stages[0].steps=5", "--checkpoint.enable=false")
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
    "pp 2, interleaved": {0: [0, 1], 1: [0, 1]},
    "pp 2, ZBV": {0: [0, 1], 1: [0, 1]},
    "tp 2 x pp 2": {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]},
}
if not SPLITS_ANY_BACKWARD:  # before torch 2.13
    del LAYOUTS["pp 2, ZBV"], SHARING["pp 2, ZBV"]


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of two sequences."""
    text = TINY.replace("global_batch_tokens = 512", "global_batch_tokens = 256")
    return write_run(tmp_path_factory.mktemp("health"), text)


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


def modules(layout: str) -> dict[str, str]:
    """What stands in this layout's blocks in place of Llama's modules."""
    return {"feed_forward": "experts", "feed_forward.w2": "router.gate"} if "experts" in layout else {}


def faults_of(layout: str) -> dict[int, Inject]:
    """Each place, on the first two ranks in turn, every second step from the third on.

    Every other layout begins with the second rank; a pipeline does not, as its embedding is on the first.
    """
    faults, first = [], 0 if "pp" in layout else list(LAYOUTS).index(layout) % 2
    for rank in (0, 1):
        for index, fault in enumerate(PLACES.values()):
            if (first + index) % 2 != rank:
                continue
            ranks_of_stage = 2 if layout.startswith("tp 2 x pp") else 1
            layer = rank // ranks_of_stage if "pp" in layout else 1 - rank
            module = modules(layout).get(fault.module, fault.module)
            faults.append(replace(fault, rank=rank, layer=layer, module=module))
    return {3 + 2 * index: replace(fault, step=3 + 2 * index) for index, fault in enumerate(faults)}


def check_culprit(layout: str, fault: Inject, found: dict[str, Any]) -> None:
    """The diagnosis names the module and rank of the fault."""
    culprit = found["culprit"]
    named = (culprit["module"], culprit["quantity"], culprit["direction"], list(found["ranks"]))
    block, rank = f"layers.{fault.layer}", fault.rank
    expected = {
        "embedding": ("tok_embeddings", "output", "forward", [rank]),
        "forward": (f"{block}.attention", "output", "forward", [rank]),
        "backward": (f"{block}.{fault.module}", "input gradient", "backward", [rank]),
        "gradient": (f"{block}.{fault.module}", "gradient of weight", "backward", [rank]),
        "data": ("data", "labels", "forward", SHARING.get(layout, {}).get(rank, [rank])),
    }
    assert named == expected[fault.where]
    assert found["reproduces"]


@deep_rows("layout", LAYOUTS, default=["cp 2"])
def test_a_fault_anywhere_is_noticed_in_its_step_and_changes_nothing_on_any_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, layout: str
) -> None:
    size, overrides = LAYOUTS[layout]
    faults, steps = faults_of(layout), 7
    folder = f"--job.dump_folder={run_toml.parent / layout.replace(' ', '-')}"
    stage = (f"--curriculum.stages[0].steps={steps}", "--checkpoint.enable=false")
    for seen in ranks(size)(watched_run, run_toml, faults, folder, *stage, *overrides):
        assert seen.bad == list(faults)
        assert seen.changed == []
        assert [line["step"] for line in seen.lines if line["skipped"]] == list(faults)
        values = [line["loss"] for line in seen.lines if not line["skipped"]]
        assert len(values) == steps
        assert values[-1] < values[0]
        for step, fault in faults.items():
            check_culprit(layout, fault, seen.diagnoses[step])


def poisoned_shard(path: Path, *overrides: str) -> Seen:
    """On a rank: a run in which rank 1's shard of one gradient is NaN in step 3, after all ranks have summed it."""
    original = ParallelModel.forward_backward
    steps = 0

    def poisoned(model: ParallelModel, micro_batches: Any) -> Any:
        nonlocal steps
        steps += 1
        sums = original(model, micro_batches)
        # The fourth is the third again.
        if steps in (3, 4) and dist.get_rank() == 1:
            local(model.parts[0].layers["0"].attention.wq.weight.grad)[1, 2] = torch.nan  # type: ignore[union-attr, index]
        return sums

    ParallelModel.forward_backward = poisoned  # type: ignore[method-assign]
    try:
        return watched_run(path, {}, *overrides)
    finally:
        ParallelModel.forward_backward = original  # type: ignore[method-assign]


def test_nan_in_one_ranks_optimizer_input_reaches_no_moment(ranks: Callable[[int], RankPool], run_toml: Path) -> None:
    for seen in ranks(2)(poisoned_shard, run_toml, f"--job.dump_folder={run_toml.parent / 'shard'}", *SHORT):
        assert (seen.bad, seen.changed) == ([3], [])
        assert seen.findings[3][0].startswith("rank 1: a weight's gradient in block 0 is nan")


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


# What the diagnosis says of other faults ---------------------------------------------------------------------------


def overflowing_run(path: Path, scales: dict[str, float], *overrides: str) -> str:
    """On a rank: a run in which weights are suddenly huge, and finite, in step 3. What it halts with."""
    trainer = prepared(path, *overrides)
    forward_backward = trainer.forward_backward

    def scaled(batches: Any) -> Any:
        if trainer.progress.step == 2:
            for part in trainer.model.parts:
                for name, parameter in part.named_parameters():
                    local(parameter.detach()).mul_(scales.get(name, 1.0))
        return forward_backward(batches)

    trainer.forward_backward = scaled  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError) as halted:
        trainer.run()
    dist.barrier()
    return str(halted.value)


# Layout, what the weights are multiplied with, the first bad value (module, quantity), and the module that made it.
OVERFLOWS = {
    "between layers": (
        "tp 2",
        {"layers.1.feed_forward.w1.weight": 1e25, "layers.1.feed_forward.w3.weight": 1e25},
        ("layers.1.feed_forward.w2", "input"),
        "layers.1.feed_forward",
    ),
    "in attention": (
        "cp 2",
        {"layers.0.attention.wq.weight": 1e30, "layers.0.attention.wk.weight": 1e12},
        ("layers.0.attention.wo", "input"),
        "layers.0.attention",
    ),
    "in a recomputed block": (
        "fsdp 2",
        {"layers.1.feed_forward.w3.weight": 1e20, "layers.1.feed_forward.w2.weight": 1e30},
        ("layers.1.feed_forward.w2", "output"),
        "layers.1.feed_forward.w2",
    ),
}


def test_a_fault_in_the_embedding_of_a_library_is_made_again_offline(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    fault = Inject(step=1, where="embedding")
    ranks(1)(watched_run, write_family(tmp_path, "Llama"), {1: fault}, "--curriculum.stages[0].steps=1")
    event = replay_with_fault(tmp_path / "run" / "health" / "step-1", fault)
    assert event is not None
    assert event.value == "nan"


@deep_rows("case", OVERFLOWS, default=["in attention"])
def test_an_overflow_is_named_and_reproduced_offline_from_its_bundle(
    ranks: Callable[[int], RankPool], run_toml: Path, case: str
) -> None:
    layout, scales, named, unit = OVERFLOWS[case]
    size, overrides = LAYOUTS[layout]
    folder = run_toml.parent / f"overflow-{case.replace(' ', '-')}"
    more = ["--data.document_mask=true", "--training.micro_batch_sequences=2", FOUR]
    if "recomputed" in case:
        more.append("--activation.checkpoint=full")
    said, *others = ranks(size)(overflowing_run, run_toml, scales, f"--job.dump_folder={folder}", *overrides, *more)
    assert all(other == said for other in others)
    assert f"the {named[1]} of {named[0]} is " in said
    assert "it comes again when the step is repeated; its tensors are in " in said
    bundle = Bundle.read(folder / "health" / "step-3")
    assert (bundle.report["module"], bundle.report["reproduces"]) == (unit, True)
    event = replay(bundle, build)
    assert event is not None
    assert (event.module, event.quantity, event.value) == (*named, bundle.report["culprit"]["value"])
    # Whole sequences, whatever ranks they were spread over.
    assert bundle.tensors["tokens"].shape == (2, 128)
    assert bundle.tensors["input.0"].shape[:2] == (2, 128)
    assert main([str(folder / "health" / "step-3")]) == 0


def test_a_bundle_that_cannot_be_written_is_not_named(ranks: Callable[[int], RankPool], run_toml: Path) -> None:
    folder = run_toml.parent / "unwritable"
    folder.mkdir()
    (folder / "health").touch()
    size, overrides = LAYOUTS[OVERFLOWS["in attention"][0]]
    arguments = (run_toml, OVERFLOWS["in attention"][1], f"--job.dump_folder={folder}", *overrides, FOUR)
    for said in ranks(size)(overflowing_run, *arguments):
        assert "it comes again when the step is repeated" in said
        assert "its tensors are in" not in said


def test_a_fault_that_is_gone_when_repeated_speaks_of_the_hardware(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    folder = run_toml.parent / "transient"
    fault = Inject(step=3, rank=1, layer=1, module="feed_forward.w1", transient=True)
    for seen in ranks(2)(watched_run, run_toml, {3: fault}, f"--job.dump_folder={folder}", *SHORT):
        assert (seen.bad, seen.changed) == ([3], [])
        assert seen.findings[3] == ("rank 1: the output of block 1 is nan",)
        assert (seen.diagnoses[3]["reproduces"], seen.diagnoses[3]["culprit"]) == (False, None)
        assert seen.diagnoses[3]["summary"].startswith("repeated, the step is finite: a hardware fault, or a race; its")
    report = Bundle.read(folder / "health" / "step-3").report
    assert (report["module"], report["findings"]) == (None, ["rank 1: the output of block 1 is nan"])


def test_where_a_token_is_follows_from_the_layout_and_the_documents(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    """Zigzag over two ranks of 64 tokens: rank 1 has tokens 32 to 95, and its local token 32 is token 64."""
    folder = f"--job.dump_folder={run_toml.parent / 'place'}"
    fault = Inject(step=3, rank=1, layer=0, module="feed_forward.w1")
    packed = ("--data.document_mask=true", "--context_parallel.layout=zigzag")
    for seen in ranks(2)(watched_run, run_toml, {3: fault}, folder, *SHORT, *LAYOUTS["cp 2"][1], *packed):
        found = seen.diagnoses[3]
        assert found["culprit"]["module"] == "layers.0.feed_forward.w1"
        assert (list(found["ranks"]), found["row"], found["local_token"], found["global_token"]) == ([1], 0, 32, 64)
        assert (found["sequence"], found["document"]) == (4, 0)


# What follows ---------------------------------------------------------------------------------------------------


@deep_rows("layout", LAYOUTS, default=["fsdp 2"])
def test_a_nonfinite_weight_is_named_and_the_checkpoint_before_it_loaded_at_once(
    ranks: Callable[[int], RankPool], run_toml: Path, layout: str
) -> None:
    size, overrides = LAYOUTS[layout]
    folder = run_toml.parent / f"weight-{layout.replace(' ', '-')}"
    fault = Inject(step=3, rank=1, where="weight", layer=1, module="attention.wk")
    settings = (
        "--curriculum.stages[0].steps=4",
        "--checkpoint.interval=1",
        "--checkpoint.keep=99",
        "--checkpoint.asynchronous=false",
    )
    if layout.startswith("tp 2 x pp"):
        fault = replace(fault, layer=0)  # which is where rank 1 is
    named = f"layers.{fault.layer}.attention.wk"
    for seen in ranks(size)(watched_run, run_toml, {3: fault}, f"--job.dump_folder={folder}", *settings, *overrides):
        assert seen.bad == [3]
        culprit = seen.diagnoses[3]["culprit"]
        assert (culprit["module"], culprit["quantity"]) == (named, "parameter weight")
        assert list(seen.diagnoses[3]["ranks"]) == [1]
        # The struck weight alone is another than before the repair: it is well again.
        assert seen.changed == ([f"{named}.weight in step 3"] if seen.rank == 1 else [])
        assert [line["rollbacks"] for line in seen.lines] == [0, 0, 1, 1, 1]
        assert [line["loss"] for line in seen.lines if line["skipped"]] == [None]
    event = replay(Bundle.read(folder / "health" / "step-3"), build)
    assert event is not None
    assert (event.module, event.quantity, event.value) == (named, "parameter weight", "nan")
    plain = (f"--job.dump_folder={folder}-straight", settings[0], "--checkpoint.enable=false")
    straight = ranks(size)(train, run_toml, *plain, *overrides)[0]
    assert losses(straight)[:2] == [line["loss"] for line in seen.lines][:2]
    assert (folder / "checkpoints" / "step-3").is_dir()


def test_a_spike_is_left_out_where_it_is_to_trip_and_only_logged_by_default(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    fault = Inject(step=18, rank=1, layer=0, kind="spike")
    settings = (
        "--curriculum.stages[0].steps=19",
        "--checkpoint.enable=false",
        "--health.spike_threshold=200",
    )
    folder = run_toml.parent / "spike"
    trip = (f"--job.dump_folder={folder}-trip", "--health.on_spike=handle")
    for seen in ranks(2)(watched_run, run_toml, {18: fault}, *settings, *trip):
        assert (seen.bad, seen.changed) == ([18], [])
        assert [line["step"] for line in seen.lines if line["spikes"]] == [18]
        assert len(seen.lines) == 20
        assert (seen.diagnoses[18]["culprit"]["module"], list(seen.diagnoses[18]["ranks"])) == ("layers.0", [1])
    alone = {18: replace(fault, rank=0)}
    [seen] = ranks(1)(watched_run, run_toml, alone, *settings, f"--job.dump_folder={folder}-warn")
    assert seen.bad == []
    assert next(line["step"] for line in seen.lines if line["spikes"]) == 18
    assert len(seen.lines) == 19


SPIKES_TRIP = (
    "--curriculum.stages[0].steps=18",
    "--checkpoint.enable=false",
    "--health.spike_threshold=200",
    "--health.on_spike=handle",
)
# Layout, what is struck, and what is to be named: module, direction, ranks.
SPIKES = {
    "cp 2": ("forward", "feed_forward.w1", "forward", [1]),
    "tp 2": ("forward", "attention.wv", "forward", [1]),
    "fsdp 2": ("backward", "attention.wo", "backward", [1]),
    "pp 2": ("forward", "feed_forward.w2", "forward", [1]),
}


@deep_rows("layout", SPIKES, default=["fsdp 2"])
def test_the_module_in_which_a_spike_arises_is_named_and_reproduced_offline(
    ranks: Callable[[int], RankPool], run_toml: Path, layout: str
) -> None:
    where, module, direction, on = SPIKES[layout]
    folder = run_toml.parent / f"spike-{layout.replace(' ', '-')}"
    fault = Inject(step=18, rank=1, layer=1, where=where, module=module, kind="spike")
    size, overrides = LAYOUTS[layout]
    settings = (*SPIKES_TRIP, f"--job.dump_folder={folder}")
    for seen in ranks(size)(watched_run, run_toml, {18: fault}, *settings, *overrides):
        assert (seen.bad, seen.changed) == ([18], [])
        found = seen.diagnoses[18]
        assert found["culprit"]["module"] == f"layers.1.{module}"
        assert (found["culprit"]["direction"], list(found["ranks"]), found["reproduces"]) == (direction, on, True)
        assert found["times"] > 4
        assert (
            f"the {found['culprit']['what']} of layers.1.{module} is {found['culprit']['value']}, " in found["summary"]
        )
        assert "times its value in a healthy step" in found["summary"]
    event = replay_with_fault(folder / "health" / "step-18", fault)
    assert event is not None
    assert (event.module, event.quantity) == (f"layers.1.{module}", found["culprit"]["quantity"])


@pytest.mark.deep
def test_a_spike_that_is_gone_when_repeated_speaks_of_the_hardware(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    gone = Inject(step=18, rank=1, layer=1, kind="spike", transient=True)
    folder = f"--job.dump_folder={run_toml.parent / 'spike-gone'}"
    for seen in ranks(2)(watched_run, run_toml, {18: gone}, *SPIKES_TRIP, folder):
        assert seen.diagnoses[18]["summary"].startswith("repeated, the step has no spike: a hardware fault, or a race")
        assert seen.diagnoses[18]["culprit"] is None


def spike_after_a_start(path: Path, fault: Inject, *overrides: str) -> Seen:
    """On a rank: a run that knows what is usual and has taken no healthy step itself, as after a resume."""
    update = Trainer._update

    def forgetting(trainer: Trainer, *arguments: Any) -> None:
        update(trainer, *arguments)
        trainer.config = replace(trainer.config, health=replace(trainer.config.health, on_spike="warn"))

    Trainer._update = forgetting  # type: ignore[method-assign]
    try:
        return watched_run(path, {fault.step: fault}, *overrides)
    finally:
        Trainer._update = update  # type: ignore[method-assign]


@pytest.mark.deep
def test_a_spike_with_no_healthy_step_before_it_is_skipped_and_said_to_be_unknown(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    fault = Inject(step=18, rank=1, layer=1, kind="spike")
    folder = f"--job.dump_folder={run_toml.parent / 'spike-first'}"
    for seen in ranks(2)(spike_after_a_start, run_toml, fault, *SPIKES_TRIP, folder, *LAYOUTS["pp 2"][1]):
        assert (seen.bad, seen.changed) == ([18], [])
        assert seen.diagnoses[18]["summary"].startswith("there is no healthy step to compare it with yet")


def saved_tensors(path: Path) -> dict[str, Tensor]:
    """Weights and moments of a checkpoint."""
    reader = open_saved_model(path).reader
    known = {name: entry for name, entry in reader.table.state_dict_metadata.items() if hasattr(entry, "size")}
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in known.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


STOPS = ("--health.max_consecutive_skips=2", "--checkpoint.interval=2", "--checkpoint.keep=99")


def test_a_run_is_rolled_back_skips_the_text_and_does_so_when_resumed(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    """Bad text in steps 6, 7 and 8: the third sends it back to step 4, and text 5 to 8 is never trained on."""
    folder, settings = run_toml.parent / "rollback", ("--curriculum.stages[0].steps=10", *STOPS)
    faults = {step: Inject(step=step, where="data") for step in (6, 7, 8)}
    found = ranks(1)(healthy_steps, run_toml, faults, f"--job.dump_folder={folder}", *settings)[0]
    text = [number // 2 for number in found[1]]
    # Step 5 was taken, and undone; then the stage's steps 5 to 10.
    assert text == [0, 1, 2, 3, 4, *range(8, 14)]
    whole = (f"--job.dump_folder={folder}-whole", "--checkpoint.enable=false", *settings[:1])
    schedule = ranks(1)(train, run_toml, *whole)[0]
    rates = [line["lr"] for line in schedule]
    assert found[2] == [*rates[:5], *rates[4:]]
    progress = json.loads((folder / "checkpoints" / "step-8" / "progress.json").read_text())
    assert progress["skipped_ranges"] == [[0, 4, 8]]
    assert (progress["step"], progress["stage_step"], progress["trained_tokens"]) == (8, 4, 4 * 256)
    assert (progress["health"]["rollbacks"], progress["health"]["rolled_back_to"]) == (1, 4)
    before, after = (saved_tensors(folder / "checkpoints" / f"step-{step}") for step in (4, 8))
    assert any("exp_avg" in name for name in before)
    assert differing(before, after) == []

    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > 8:
            shutil.rmtree(path)
    resumed = ranks(1)(healthy_steps, run_toml, {}, f"--job.dump_folder={folder}", *settings)[0]
    assert [number // 2 for number in resumed[1]] == [*range(8, 14)]
    assert resumed[0] == found[0]


@pytest.mark.deep
def test_a_run_that_diverges_is_skipped_rolled_back_and_halted(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    """The learning rate is 100 times too high once it is warm."""
    settings = (
        f"--job.dump_folder={run_toml.parent / 'diverges'}",
        FOUR,
        "--optimizer.lr=0.3",
        "--lr_scheduler.warmup_steps=40",
        "--curriculum.stages[0].steps=45",
        "--health.on_spike=handle",
        "--health.max_consecutive_skips=1",
        "--health.max_rollbacks=1",
        "--checkpoint.interval=4",
        "--checkpoint.keep=99",
    )
    end, lines = ranks(1)(ending, run_toml, {}, *settings)[0]
    assert end.startswith("step ")
    assert lines[-1]["rollbacks"] == 1
    assert len(lines) < 70
    assert len([line for line in lines if line["skipped"]]) >= 3
    assert "1 rollbacks, and health.max_rollbacks = 1. No weight was changed" in end


def ending(path: Path, faults: dict[int, Inject], *overrides: str) -> tuple[str, list[dict[str, Any]]]:
    """On a rank: how a run with a fault in each of these steps ends, and its records."""
    trainer, end = prepared(path, "--health.on_nonfinite=skip", *overrides), "trained"
    take = trainer._step

    def with_fault(*arguments: Any) -> bool:
        inject(trainer, faults.get(trainer.progress.step + 1))
        return take(*arguments)

    trainer._step = with_fault  # type: ignore[method-assign]
    try:
        trainer.run()
    except NonFiniteError as error:
        end = str(error)
    dist.barrier()
    return end, [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]


@deep_rows("where", ["data", "backward"], default=["data"])
def test_halt_names_step_stage_rank_and_number_and_saves_what_was_before(
    ranks: Callable[[int], RankPool], run_toml: Path, where: str
) -> None:
    folder = run_toml.parent / f"halt-{where}"
    faults = {3: Inject(step=3, rank=1, where=where, layer=1)}
    overrides = (f"--job.dump_folder={folder}", "--health.replay=false", "--health.on_nonfinite=halt")
    for end, lines in ranks(2)(ending, run_toml, faults, *overrides):
        number = "the loss is inf" if where == "data" else "the gradient at its first block is nan, the loss is finite"
        assert end.startswith(f"step 3 (stage 1, 128) is not finite: rank 1: {number}. ")
        assert len(lines) == 2
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]
    assert not (folder / "health").exists()


def test_a_halt_over_a_nonfinite_weight_saves_none_and_the_last_checkpoint_goes_on(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    folder = run_toml.parent / "halt-weight"
    settings = (f"--job.dump_folder={folder}", "--checkpoint.interval=2", "--checkpoint.keep=1", *SHORT[:1])
    faults = {4: Inject(step=4, rank=1, where="weight", module="attention.wk")}
    for end, lines in ranks(2)(ending, run_toml, faults, *settings, "--health.on_nonfinite=halt"):
        assert end.startswith("step 4 (stage 1, 128) is not finite")
        assert len(lines) == 3
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]
    for end, lines in ranks(2)(ending, run_toml, {}, *settings):
        assert (end, len(lines)) == ("trained", 5)


def timed(path: Path, faults: dict[int, Inject], *overrides: str) -> tuple[str, list[dict[str, Any]], list[float]]:
    """On a rank: how a run ends, its records, and how long it may diagnose a bad step and look for a checkpoint."""
    limits, diagnose, load = list[float](), Diagnoser.diagnose, CheckpointManager.load

    def diagnosed(*arguments: Any) -> Any:
        limits.append(failure._now.limit_seconds)
        return diagnose(*arguments)

    def loaded(*arguments: Any) -> None:
        limits.append(failure._now.limit_seconds)
        load(*arguments)

    Diagnoser.diagnose, CheckpointManager.load = diagnosed, loaded  # type: ignore[method-assign]
    try:
        return *ending(path, faults, *overrides), limits
    finally:
        Diagnoser.diagnose, CheckpointManager.load = diagnose, load  # type: ignore[method-assign]


@pytest.mark.deep
def test_a_diagnosis_and_a_rollback_have_the_time_of_a_start_and_of_a_checkpoint(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    settings = (f"--job.dump_folder={run_toml.parent / 'time'}", "--checkpoint.interval=2", *SHORT[:1])
    faults = {4: Inject(step=4, rank=1, where="weight", module="attention.wk")}
    times = ("--job.timeout_seconds=100", "--job.startup_timeout_seconds=200", "--checkpoint.timeout_seconds=300")
    for end, lines, limits in ranks(2)(timed, run_toml, faults, *settings, *times):
        assert end == "trained"
        assert [line["rollbacks"] for line in lines][2:5] == [0, 1, 1]
        assert limits == [300.0, 300.0]


@pytest.mark.deep
def test_a_step_that_is_skipped_costs_no_run_that_takes_its_source_to_the_end(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    folder = run_toml.parent / "epochs"
    few = ("--data.max_epochs={corpus=0.0137}", "--curriculum.stages[0].steps=8", FOUR)
    with pytest.raises(RankFailure, match=r"data.max_epochs allows stage 1 only 3. sequences"):
        ranks(1)(ending, run_toml, {}, few[0], few[1].replace("8", "9"), FOUR, f"--job.dump_folder={folder}-long")
    end, lines = ranks(1)(ending, run_toml, {3: Inject(step=3, where="data")}, *few, f"--job.dump_folder={folder}")[0]
    assert (end, len(lines)) == ("trained", 9)
    assert [line["step"] for line in lines if line["skipped"]] == [3]


def diagnose_compiled(path: Path, *overrides: str) -> tuple[str, bool]:
    """On a rank: what the diagnosis of compiled blocks says, and whether they are as they were after it."""
    trainer = prepared(path, "--compile.enable=true", *overrides)
    shape = trainer.enter_stage(trainer.stages[0])
    layers = list(trainer.model.parts[0].layers.values())  # type: ignore[operator, union-attr]
    compiled = [vars(layer)["forward"] for layer in layers]
    local(layers[1].feed_forward.w3.weight.detach()).mul_(1e20)
    local(layers[1].feed_forward.w2.weight.detach()).mul_(1e30)
    batches = read_step(trainer.data_pipeline.samples, shape, 0)
    report = StepReport(loss=1.0, grad_norm=1.0, peak_memory_bytes=0, findings=("rank 0: the loss is nan",))
    loss = trainer.model.token_loss
    with trainer.model.uncompiled():
        assert loss.compiled_losses is None
    found = trainer.step_runner.diagnoser.diagnose(batches, report, ())
    assert all(parameter.grad is None for parameter in trainer.model.parts.parameters())
    restored = [vars(layer)["forward"] for layer in layers] == compiled
    return found.summary, restored and loss.compiled_losses is not None


@pytest.mark.deep
def test_compiled_blocks_are_repeated_as_they_are_without_it_and_compiled_again_after(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    folder = f"--job.dump_folder={run_toml.parent / 'compiled'}"
    for checkpoint in ("none", "full"):
        said, restored = ranks(1)(diagnose_compiled, run_toml, folder, f"--activation.checkpoint={checkpoint}")[0]
        assert restored
        assert "the output of layers.1.feed_forward.w2 is " in said
        assert "it comes again when the step is repeated without torch.compile" in said


def full_disk(error: type[Exception], path: Path, *overrides: str) -> Seen:
    """On a rank: a run that has no room for the tensors of a bad step."""
    with patch("torchtitan_cp.health.replay.save_file", side_effect=error("No space left on device")):
        return watched_run(path, {3: Inject(step=3, rank=0, layer=0)}, *overrides)


@pytest.mark.deep
@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_a_full_disk_keeps_no_tensors_and_training_goes_on(
    ranks: Callable[[int], RankPool], run_toml: Path, error: type[Exception]
) -> None:
    folder = f"--job.dump_folder={run_toml.parent / f'full-disk-{error.__name__}'}"
    first, second = ranks(2)(full_disk, error, run_toml, folder, *SHORT)
    assert len(first.lines) == len(second.lines) == 6
    assert any("tensors of step 3 cannot be written" in line and "No space left" in line for line in first.logged)


def test_a_rollback_over_the_border_of_two_stages_ends_the_first_again_and_skips_the_seconds_text(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    """The first three steps of the second stage are bad; the newest checkpoint is the first stage's end."""
    folder = run_toml.parent / "border"
    table = "{seq_len = %d, steps = 4, global_batch_tokens = 512}"
    stages = f"--curriculum.stages=[{table % 128}, {table % 256}]"
    settings = ("--health.max_consecutive_skips=2", "--checkpoint.interval=99", "--checkpoint.keep=9")
    faults = {step: Inject(step=step, where="data") for step in (5, 6, 7)}
    _, text, rates = ranks(1)(healthy_steps, run_toml, faults, f"--job.dump_folder={folder}", stages, *settings)[0]
    assert [number // 4 for number in text[:4]] == [0, 1, 2, 3]
    assert [number // 2 for number in text[4:]] == [3, 4, 5, 6]
    assert len(set(rates)) == 8
    progress = json.loads((folder / "checkpoints" / "step-11" / "progress.json").read_text())
    assert progress["skipped_ranges"] == [[1, 0, 3]]
    assert (progress["stage"], progress["stage_step"], progress["health"]["rolled_back_to"]) == (1, 4, 4)
    evaluations = [json.loads(line)["step"] for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    assert len(evaluations) == 2, evaluations
