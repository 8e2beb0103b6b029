"""Spikes: where one arises, whether it is hardware, and what follows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.deep import deep_rows
from tests.support.faulty_runs import LAYOUTS, Seen, watched_run
from tests.support.inject import Inject, replay_with_fault
from tests.support.rank_pool import RankPool
from torchtitan_cp.training.trainer import Trainer


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
            f"the {found['culprit']['quantity']} of layers.1.{module} is {found['culprit']['value']}, "
            in found["summary"]
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
