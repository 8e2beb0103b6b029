"""Experts on ranks: the balance loss in the gradient exactly once, however the work is split."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.parity import rows_of, verify
from tests.support.rank_pool import RankPool
from tests.support.runs import EXPERTS, first_gradients, losses, train_and_first_gradients, write_run

# [number of ranks, overrides]
LAYOUTS = {
    "FSDP 2": (2, []),
    "FSDP 2, two sequences at once, no accumulation": (2, ["--training.micro_batch_sequences=2"]),
    "CP 2": (2, ["--parallel.cp=2"]),
    "FSDP 2 x CP 2, hybrid, recomputed": (
        4,
        [
            *("--parallel.cp=4", "--context_parallel.strategy=hybrid"),
            "--activation.checkpoint=full",
        ],
    ),
    "HSDP 2 x CP 2, all-to-all, MLP in 3 tiles": (
        4,
        [
            *("--parallel.dp_replicate=2", "--parallel.cp=2", "--context_parallel.strategy=all_to_all"),
            "--activation.mlp_tiles=3",
        ],
    ),
}


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("moe"), EXPERTS)


@pytest.fixture(scope="module")
def reference(ranks: Callable[[int], RankPool], run_toml: Path) -> tuple[list[float], dict[str, Tensor]]:
    own = f"--job.dump_folder={run_toml.parent / 'one'}"
    lines, gradients = ranks(1)(train_and_first_gradients, run_toml, own)[0]
    return losses(lines), gradients


def test_the_balance_loss_is_in_the_gradient_and_not_in_the_loss_that_is_told(
    ranks: Callable[[int], RankPool], run_toml: Path, reference: tuple[list[float], dict[str, Tensor]]
) -> None:
    loss, gradients = ranks(1)(first_gradients, run_toml, "--model.overrides.balance=0.0")[0]
    assert loss == reference[0][0]
    gate = "layers.0.router.gate.weight"
    assert (gradients[gate] - reference[1][gate]).norm() > 0.1 * reference[1][gate].norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_losses_and_gradients_of_one_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, reference: tuple[list[float], dict[str, Tensor]], layout: str
) -> None:
    size, overrides = LAYOUTS[layout]
    folder = f"--job.dump_folder={run_toml.parent / layout.replace(' ', '-')}"
    lines, gradients = ranks(size)(train_and_first_gradients, run_toml, folder, *overrides)[0]
    assert lines[0]["loss"] == pytest.approx(reference[0][0], rel=1e-5)
    assert gradients.keys() == reference[1].keys()
    for name, gradient in gradients.items():
        error = (gradient - reference[1][name]).abs().max() / reference[1][name].abs().max()
        assert error < 1e-5, (name, error)
    assert losses(lines) == pytest.approx(reference[0], rel=1e-4)


def test_parity_holds_with_the_plain_model(ranks: Callable[[int], RankPool], run_toml: Path) -> None:
    assert ranks(2)(verify, run_toml, "--parallel.cp=2") == [True] * 2
    (comparison,) = rows_of(run_toml.parent)
    assert comparison["holds"]
