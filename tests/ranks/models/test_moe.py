"""Experts: the balance loss, parity, and going on. Layouts are in tests/ranks/training/test_parity.py."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.parity import rows_of, verify
from tests.support.rank_pool import RankPool
from tests.support.runs import EXPERTS, first_gradients, losses, train, write_run


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("moe"), EXPERTS)


def test_the_balance_loss_is_in_the_gradient_and_not_in_the_reported_loss(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    balanced_loss, balanced = ranks(1)(first_gradients, run_toml)[0]
    loss, gradients = ranks(1)(first_gradients, run_toml, "--model.overrides.balance=0.0")[0]
    assert loss == balanced_loss
    gate = "layers.0.router.gate.weight"
    assert (gradients[gate] - balanced[gate]).norm() > 0.1 * balanced[gate].norm()


def test_parity_holds_with_the_plain_model(ranks: Callable[[int], RankPool], run_toml: Path) -> None:
    assert ranks(2)(verify, run_toml, "--parallel.cp=2", "--parallel.ep=2") == [True] * 2
    (comparison,) = rows_of(run_toml.parent)
    assert comparison["holds"]


@pytest.mark.deep
def test_a_run_that_shares_experts_goes_on_bit_for_bit_and_elsewhere_within_the_tolerance(
    ranks: Callable[[int], RankPool], run_toml: Path, tmp_path: Path
) -> None:
    overrides = [f"--job.dump_folder={tmp_path}/run", "--curriculum.stages[0].steps=4", "--checkpoint.interval=2"]
    overrides += ["--parallel.cp=2", "--parallel.ep=2"]
    straight = losses(ranks(2)(train, run_toml, *overrides)[0])
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    assert losses(ranks(2)(train, run_toml, *overrides)[0]) == straight
    elsewhere = [f"--job.dump_folder={tmp_path}/elsewhere", "--parallel.ep=1"]
    assert losses(ranks(2)(train, run_toml, *overrides, *elsewhere)[0]) == pytest.approx(straight, rel=1e-4)


STAGES = "".join(
    f"\n[[curriculum.stages]]\nseq_len = {64 * cp}\nsteps = 2\nglobal_batch_tokens = 512\ncp = {cp}\n"
    for cp in (1, 2, 4)
)


@pytest.mark.deep
def test_stages_change_cp_while_ep_stays(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path = write_run(tmp_path, EXPERTS.split("[[curriculum")[0] + STAGES)
    alone = [f"--curriculum.stages[{number}].cp=1" for number in range(3)]
    want = losses(ranks(1)(train, path, f"--job.dump_folder={tmp_path}/one", *alone)[0])
    assert losses(ranks(4)(train, path, "--parallel.ep=2")[0]) == pytest.approx(want, rel=1e-4)
