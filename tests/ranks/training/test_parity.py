"""Every layout gives one process's losses and gradients; one process gives plain PyTorch's."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.llama import FLAVORS, Llama
from tests.support.rank_pool import RankPool
from tests.support.runs import first_gradients, losses, prepared, train_and_first_gradients, write_run
from torchtitan_cp.curriculum import rope_frequencies

# [number of ranks, overrides]
LAYOUTS = {
    "one rank": (1, []),
    "FSDP 2": (2, []),
    "CP 2": (2, ["--parallel.cp=2"]),
    "CP 4": (4, ["--parallel.cp=4"]),
    "FSDP 2 x CP 2": (4, ["--parallel.cp=2"]),
    "CP 2, contiguous": (2, ["--parallel.cp=2", "--context_parallel.layout=contiguous"]),
    "CP 2, all-gather": (2, ["--parallel.cp=2", "--context_parallel.strategy=all_gather"]),
    "CP 4, all-to-all": (4, ["--parallel.cp=4", "--context_parallel.strategy=all_to_all"]),
    "CP 4, hybrid, balanced": (
        4,
        ["--parallel.cp=4", "--context_parallel.strategy=hybrid", "--context_parallel.layout=balanced"],
    ),
    "CP 2, recomputed": (2, ["--parallel.cp=2", "--activation.checkpoint=full"]),
    "CP 2, attention saved": (2, ["--parallel.cp=2", "--activation.checkpoint=attention_saved"]),
    "CP 2, selective, compiled": (
        2,
        ["--parallel.cp=2", "--activation.checkpoint=selective", "--compile.enable=true"],
    ),
    "CP 2, MLP in 3 tiles, recomputed": (
        2,
        ["--parallel.cp=2", "--activation.checkpoint=full", "--activation.mlp_tiles=3"],
    ),
    "TP 2": (2, ["--parallel.tp=2"]),
    "HSDP 2 x FSDP 2": (4, ["--parallel.dp_replicate=2"]),
    "CP 2 x TP 2": (4, ["--parallel.cp=2", "--parallel.tp=2"]),
    "CP 2 x TP 2, all-to-all, attention saved": (
        4,
        [
            "--parallel.cp=2",
            "--parallel.tp=2",
            "--context_parallel.strategy=all_to_all",
            "--activation.checkpoint=attention_saved",
        ],
    ),
    "HSDP 2 x CP 2 x TP 2, MLP in 2 tiles": (
        8,
        ["--parallel.dp_replicate=2", "--parallel.cp=2", "--parallel.tp=2", "--activation.mlp_tiles=2"],
    ),
    "FSDP 2, two sequences at once": (2, ["--training.micro_batch_sequences=2"]),
}


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def reference(ranks: Callable[[int], RankPool], run_toml: Path) -> tuple[list[float], dict[str, Tensor]]:
    own_folder = f"--job.dump_folder={run_toml.parent / 'one-rank'}"
    lines, gradients = ranks(1)(train_and_first_gradients, run_toml, own_folder)[0]
    return losses(lines), gradients


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_a_layout_gives_the_losses_and_first_gradients_of_one_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, reference: tuple[list[float], dict[str, Tensor]], layout: str
) -> None:
    size, overrides = LAYOUTS[layout]
    folder = f"--job.dump_folder={run_toml.parent / layout.replace(' ', '-')}"
    lines, gradients = ranks(size)(train_and_first_gradients, run_toml, folder, *overrides)[0]
    assert len(lines) == 20
    assert losses(lines) == pytest.approx(reference[0], rel=1e-4)
    assert lines[0]["loss"] == pytest.approx(reference[0][0], rel=1e-5)
    assert gradients.keys() == reference[1].keys()
    for name, gradient in gradients.items():
        assert relative(gradient, reference[1][name]) < 1e-5, name


def plain_first_gradients(path: Path) -> tuple[float, dict[str, Tensor]]:
    """The first step in fp64 with nothing of ours but the model's formulas: SDPA and full logits."""
    trainer = prepared(path)
    shape = dataclasses.replace(FLAVORS["debug"], **trainer.config.model.overrides, vocab_size=257)

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: object, window: int) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)

    model = Llama(shape, attend).double()
    with torch.no_grad():
        for (_, ours), theirs in zip(trainer.model.parts[0].named_parameters(), model.parameters(), strict=True):
            theirs.copy_(ours.full_tensor())  # type: ignore[attr-defined]
    model.set_rope(
        *rope_frequencies(trainer.stages[0].rope, shape.head_dim, trainer.stages[0].seq_len), torch.device("cpu")
    )
    trainer.enter_stage(trainer.stages[0])
    rows = [trainer.data_pipeline.samples.sequence(number) for number in range(4)]
    tokens, labels = (
        torch.stack([torch.from_numpy(part) for part in parts])
        for parts in zip(*((r.tokens, r.labels) for r in rows), strict=True)
    )
    loss = F.cross_entropy(model(tokens, torch.arange(128), None).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_one_rank_gives_the_loss_and_gradients_of_plain_pytorch_in_fp64(
    ranks: Callable[[int], RankPool], run_toml: Path, reference: tuple[list[float], dict[str, Tensor]]
) -> None:
    loss, gradients = ranks(1)(plain_first_gradients, run_toml)[0]
    assert reference[0][0] == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        assert relative(reference[1][name].double(), gradient) < 1e-5, name


def test_bf16_on_ranks_stays_close_to_fp32(
    ranks: Callable[[int], RankPool], run_toml: Path, reference: tuple[list[float], dict[str, Tensor]]
) -> None:
    overrides = ["--parallel.cp=2", "--training.compute_dtype=bfloat16"]
    loss, gradients = ranks(2)(first_gradients, run_toml, *overrides)[0]
    assert loss == pytest.approx(reference[0][0], rel=2e-3)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32, "gradients are reduced and kept in fp32"
        # bf16 rounds at 2^-9; a gradient passes some ten roundings on its way through two layers.
        assert relative(gradient, reference[1][name]) < 10 * 2**-8, name
