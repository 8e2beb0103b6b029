"""What follows a bad step: text that is skipped, a rollback, a halt."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.support.deep import deep_rows
from tests.support.faulty_runs import FOUR, SHORT, differing, ending, healthy_steps
from tests.support.inject import Inject
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.runs import train
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.weights import open_saved_model
from torchtitan_cp.health.diagnosis import Diagnoser
from torchtitan_cp.runtime import watchdog as failure


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


def saved_tensors(path: Path) -> dict[str, Tensor]:
    """Weights and moments of a checkpoint."""
    reader = open_saved_model(path).reader
    known = {name: entry for name, entry in reader.table.state_dict_metadata.items() if hasattr(entry, "size")}
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in known.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


STOPS = ("--checkpoint.interval=2", "--checkpoint.keep=99")


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


def test_a_rollback_over_the_border_of_two_stages_ends_the_first_again_and_skips_the_seconds_text(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    """The first three steps of the second stage are bad; the newest checkpoint is the first stage's end."""
    folder = run_toml.parent / "border"
    table = "{seq_len = %d, steps = 4, global_batch_tokens = 512}"
    stages = f"--curriculum.stages=[{table % 128}, {table % 256}]"
    settings = ("--checkpoint.interval=99", "--checkpoint.keep=9")
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
