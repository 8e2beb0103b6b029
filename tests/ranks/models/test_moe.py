"""Experts: the balance loss in the gradient alone, and parity. Layouts are in tests/ranks/training/test_parity.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.parity import rows_of, verify
from tests.support.rank_pool import RankPool
from tests.support.runs import EXPERTS, first_gradients, write_run


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
    assert ranks(2)(verify, run_toml, "--parallel.cp=2") == [True] * 2
    (comparison,) = rows_of(run_toml.parent)
    assert comparison["holds"]
