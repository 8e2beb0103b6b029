"""The module in which a bad number arises is named, and reproduced offline from its bundle."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from safetensors import SafetensorError

from tests.support.deep import deep_rows
from tests.support.doctor import write_family
from tests.support.faulty_runs import FOUR, LAYOUTS, SHORT, Seen, local, watched_run
from tests.support.inject import Inject, replay_with_fault
from tests.support.rank_pool import RankPool
from tests.support.runs import losses, prepared, train
from torchtitan_cp.cli.replay import build, main
from torchtitan_cp.data.batches.micro_batches import read_step
from torchtitan_cp.health.monitor import StepReport
from torchtitan_cp.health.recovery import NonFiniteError
from torchtitan_cp.health.replay import Bundle, replay


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


@pytest.mark.deep
def test_an_overflow_before_a_scan_of_a_library_is_reproduced_offline_from_its_bundle(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    scales = {"model.layers.0.mixer.in_proj.weight": 1e36}
    said, _ = ranks(2)(overflowing_run, write_family(tmp_path, "Nemotron-H"), scales, "--parallel.cp=2")
    bundle = Bundle.read(tmp_path / "run" / "health" / "step-3")
    assert (bundle.report["module"], bundle.report["reproduces"]) == ("model.layers.0.mixer", True), said
    event = replay(bundle, build)
    assert event is not None
    assert event.value == bundle.report["culprit"]["value"]


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
