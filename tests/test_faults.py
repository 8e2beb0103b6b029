"""A number that is not finite on one rank stops the step on all, and poisons nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ranks import RankFailure, RankPool
from tests.runs import losses, prepared, write_run

POISONED_STEP = 3


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("faults"))


def train_with_fault(path: Path, where: str, steps: int, *overrides: str) -> tuple[list[float | None], list[Tensor]]:
    """On a rank: a run in which rank 1 makes a NaN in `steps` steps from the third on.

    Returns the losses, and the weights before and after the poisoned steps.
    """
    trainer = prepared(path, "--checkpoint.enable=false", *overrides)
    block = trainer.parts[0].layers["1"].feed_forward.w2
    poison = range(POISONED_STEP - 1, POISONED_STEP - 1 + steps)

    def ill() -> bool:
        return trainer.world.rank == 1 and trainer.progress.step in poison

    if where == "forward":
        block.register_forward_hook(lambda module, inputs, out: out * float("nan") if ill() else out)
    else:
        hook = lambda gradient: gradient * float("inf") if ill() else gradient  # noqa: E731
        block.register_forward_hook(
            lambda module, inputs, out: (out.register_hook(hook) if out.requires_grad else 0, out)[1]
        )

    snapshots = []
    update = trainer._update_or_skip

    def watched(*arguments: object) -> bool:
        before = [p.to_local().clone() for p in trainer.parts[0].parameters()]
        moments = [s.to_local().clone() for state in trainer.optimizers[0].state.values() for s in (state["exp_avg"],)]
        skipped = update(*arguments)
        if skipped:
            after = [p.to_local() for p in trainer.parts[0].parameters()]
            after_moments = [state["exp_avg"].to_local() for state in trainer.optimizers[0].state.values()]
            snapshots.append(
                all(torch.equal(a, b) for a, b in zip(before + moments, after + after_moments, strict=True))
            )
        return skipped

    trainer._update_or_skip = watched  # type: ignore[method-assign, assignment]
    trainer.run()
    text = (trainer.folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return losses(lines), snapshots  # type: ignore[return-value]


@pytest.mark.parametrize(("where", "named"), [("forward", "the loss is nan"), ("backward", "the gradient at its")])
def test_halt_names_step_stage_rank_and_number(
    ranks: Callable[[int], RankPool], run_toml: Path, where: str, named: str
) -> None:
    folder = f"--job.dump_folder={run_toml.parent / where}"
    with pytest.raises(RankFailure, match=rf"step 3 \(stage 1, 128\) is not finite: rank 1: {named}"):
        ranks(2)(train_with_fault, run_toml, where, 1, folder)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_skip_changes_neither_weights_nor_moments_on_any_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, where: str
) -> None:
    folder = f"--job.dump_folder={run_toml.parent / ('skip-' + where)}"
    answers = ranks(2)(train_with_fault, run_toml, where, 2, folder, "--health.on_nonfinite=skip")
    for values, unchanged in answers:
        assert [step for step, loss in enumerate(values, start=1) if loss is None] == [3, 4]
        assert len(values) == 20
        assert unchanged == [True, True]
        assert values[-1] < values[0]  # type: ignore[operator]


def test_too_many_skips_in_a_row_halt(ranks: Callable[[int], RankPool], run_toml: Path) -> None:
    folder = f"--job.dump_folder={run_toml.parent / 'limit'}"
    skip = ("--health.on_nonfinite=skip", "--health.max_consecutive_skips=2")
    with pytest.raises(RankFailure, match=r"step 5 .* Skipped 2 steps in a row before it"):
        ranks(2)(train_with_fault, run_toml, "forward", 3, folder, *skip)
