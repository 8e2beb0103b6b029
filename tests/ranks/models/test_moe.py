"""Experts: the balance loss, parity, and going on. Layouts are in tests/ranks/training/test_parity.py."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.compiled import counting_backend
from tests.support.deep import deep_rows
from tests.support.parity import rows_of, verify
from tests.support.rank_pool import RankPool
from tests.support.runs import EXPERTS, first_gradients, gradients_of, losses, prepared, train, write_run
from torchtitan_cp.data.batches.micro_batches import read_step


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


TWO_LENGTHS = EXPERTS.split("[[curriculum")[0] + "".join(
    f"\n[[curriculum.stages]]\nseq_len = {length}\nsteps = 3\nglobal_batch_tokens = 512\n" for length in (64, 128)
)
ROUTER = ("--model.overrides.n_shared_experts=1", "--model.overrides.expert_bias=true")


def gradients_of_steps(
    path: Path, backend: str, *overrides: str
) -> tuple[list[tuple[float, dict[str, Tensor]]], list[int]]:
    """On a rank: loss and gradients of three steps of each stage from the first weights, and the graphs after each.

    In a stage's last step all tokens go to the first three of six experts.
    """
    found, graphs = [], []
    with counting_backend(backend) as counter:
        trainer = prepared(path, "--checkpoint.enable=false", *ROUTER, *overrides)
        for stage in trainer.stages:
            layout = trainer.enter_stage(stage)
            for step in range(3):
                for bias in trainer.model.parts[0].router_biases.values():
                    bias[:3] = 100.0 * (step == 2)
                found.append(gradients_of(trainer, read_step(trainer.data_pipeline.samples, layout, step)))
                graphs.append(counter.frame_count)
                trainer.model.zero_grad()
    return found, graphs


COMPILED = [
    *(("inductor", f"--activation.checkpoint={kind}") for kind in ("none", "full", "attention_saved", "selective")),
    ("inductor", "--activation.checkpoint=full --activation.mlp_tiles=3"),
    ("aot_eager", "--activation.checkpoint=attention_saved"),
]


@deep_rows(("backend", "options"), COMPILED, default=COMPILED[-1:])
def test_compiled_ranks_that_share_experts_give_the_gradients_of_one_process_and_compile_once_for_each_length(
    ranks: Callable[[int], RankPool], tmp_path: Path, backend: str, options: str
) -> None:
    path = write_run(tmp_path, TWO_LENGTHS)
    wanted, none = ranks(1)(gradients_of_steps, path, backend)[0]
    assert none == [0] * 6
    overrides = ("--parallel.cp=2", "--parallel.ep=2", "--compile.enable=true", *options.split())
    found, graphs = ranks(2)(gradients_of_steps, path, backend, *overrides)[0]
    assert graphs[0] == graphs[2] < graphs[3] == graphs[5]
    for (loss, gradients), (want_loss, want) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(want_loss, rel=1e-5)
        for name, gradient in gradients.items():
            assert (gradient - want[name]).norm() <= 1e-5 * want[name].norm(), name
