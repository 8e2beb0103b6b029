"""Four dimensions together give one process's losses, gradients and gradient norm; a wide run of the parity tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, losses, packed_gradients, train_and_first_gradients, write_run
from torchtitan_cp.parallel.pipeline import SPLITS_ANY_BACKWARD

FOUR_LAYERS = TINY.replace("n_layers = 2", "n_layers = 4")
UNTIED = "--model.overrides.tie_embeddings=false"
WINDOWS = "--model.overrides.windows=[20, 0, 50]"
MODELS = {"": [], "untied": [UNTIED], "windows": [WINDOWS]}

# [number of ranks, degrees and strategies, other overrides]
MATRIX = {
    "PP 2, GPipe": (2, "pp=2 pp_schedule=gpipe", []),
    "PP 2, 1F1B": (2, "pp=2", []),
    "PP 2, 1F1B, untied": (2, "pp=2", [UNTIED]),
    "PP 4, 1F1B": (4, "pp=4", []),
    "PP 2, interleaved": (2, "pp=2 pp_schedule=interleaved_1f1b", []),
    "PP 2, interleaved zero bubble": (2, "pp=2 pp_schedule=interleaved_zero_bubble", []),
    "PP 2, ZBV": (2, "pp=2 pp_schedule=zbv_zero_bubble", []),
    "PP 2, split by hand, recomputed": (2, "pp=2 pp_split=[3]", ["--activation.checkpoint=full"]),
    "PP 2 x FSDP 2": (4, "pp=2", []),
    "PP 2 x HSDP 2": (4, "pp=2 dp_replicate=2", []),
    "PP 2 x TP 2": (4, "pp=2 tp=2", []),
    "PP 2 x CP 2, ring, attention saved": (4, "pp=2 cp=2", ["--activation.checkpoint=attention_saved"]),
    "PP 2 x CP 2, all-gather, interleaved": (
        4,
        "pp=2 cp=2 pp_schedule=interleaved_1f1b",
        ["--context_parallel.strategy=all_gather"],
    ),
    "PP 2 x CP 2, all-to-all, compiled": (
        4,
        "pp=2 cp=2",
        ["--context_parallel.strategy=all_to_all", "--compile.enable=true"],
    ),
    "CP 4, hybrid, compiled": (
        4,
        "cp=4",
        ["--context_parallel.strategy=hybrid", "--context_parallel.all_to_all_ranks=2", "--compile.enable=true"],
    ),
    "PP 2 x CP 4, hybrid": (
        8,
        "pp=2 cp=4",
        ["--context_parallel.strategy=hybrid", "--context_parallel.all_to_all_ranks=2"],
    ),
    "FSDP 2 x TP 2, compiled": (4, "tp=2", ["--compile.enable=true"]),
    "CP 2 x TP 2, compiled, attention saved": (
        4,
        "cp=2 tp=2",
        ["--compile.enable=true", "--activation.checkpoint=attention_saved"],
    ),
    "PP 2 x CP 2 x TP 2": (8, "pp=2 cp=2 tp=2", []),
    "PP 2 x FSDP 2 x TP 2, ZBV, MLP in 2 tiles": (
        8,
        "pp=2 tp=2 pp_schedule=zbv_zero_bubble",
        ["--activation.mlp_tiles=2"],
    ),
    "PP 2 x FSDP 2 x CP 2, selective": (8, "pp=2 cp=2", ["--activation.checkpoint=selective"]),
    "PP 2 x CP 2, layers with windows": (4, "pp=2 cp=2", [WINDOWS]),
    "CP 4, layers with windows, compiled": (4, "cp=4", [WINDOWS, "--compile.enable=true"]),
    "FSDP 2 x CP 2 x TP 2, balanced": (8, "cp=2 tp=2", ["--context_parallel.layout=balanced"]),
}


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("matrix"), FOUR_LAYERS)


References = dict[str, tuple[list[dict[str, float]], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def references(ranks: Callable[[int], RankPool], run_toml: Path) -> References:
    found = {}
    for name, model in MODELS.items():
        overrides = [*model, f"--job.dump_folder={run_toml.parent}/one-{name}"]
        found[name] = ranks(1)(train_and_first_gradients, run_toml, *overrides)[0]
    return found


@pytest.mark.parametrize("layout", MATRIX)
def test_a_layout_gives_the_losses_gradients_and_norms_of_one_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, references: References, layout: str
) -> None:
    size, degrees, others = MATRIX[layout]
    if "zero" in degrees and not SPLITS_ANY_BACKWARD:
        pytest.skip("zero-bubble schedules need torch 2.13")
    overrides = [f"--parallel.{degree}" for degree in degrees.split()] + others
    want_lines, want_gradients = references[
        next((name for name, model in MODELS.items() if model and model[0] in others), "")
    ]
    folder = f"--job.dump_folder={run_toml.parent / layout.replace(' ', '-')}"
    lines, gradients = ranks(size)(train_and_first_gradients, run_toml, folder, *overrides)[0]
    assert lines[0]["loss"] == pytest.approx(want_lines[0]["loss"], rel=1e-5)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in gradients.items():
        error = (gradient - want_gradients[name]).abs().max() / want_gradients[name].abs().max()
        assert error < 1e-5, (name, error)
    assert losses(lines) == pytest.approx(losses(want_lines), rel=1e-4)
    for got, want in zip(lines, want_lines, strict=True):
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
        assert (0 < got["pipeline_idle"] < 1) if "pp=" in degrees else got["pipeline_idle"] is None


PACKED = {
    "FSDP 2": (2, "dp_shard=2", []),
    "one rank, four sequences at once": (1, "pp=1", ["--training.micro_batch_sequences=4"]),
    "FSDP 2, two sequences at once, no accumulation": (2, "dp_shard=2", ["--training.micro_batch_sequences=2"]),
    "CP 2, recomputed": (2, "cp=2", ["--activation.checkpoint=full"]),
    "CP 4, all-gather, windows": (4, "cp=4", ["--context_parallel.strategy=all_gather", WINDOWS]),
    "PP 2 x CP 2, balanced": (4, "pp=2 cp=2", ["--context_parallel.layout=balanced"]),
    "FSDP 2 x CP 2 x TP 2": (8, "cp=2 tp=2", []),
}


@pytest.mark.parametrize("layout", PACKED)
def test_packed_documents_with_unequal_counts_of_tokens_give_the_gradients_of_one_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, layout: str
) -> None:
    size, degrees, others = PACKED[layout]
    overrides = [f"--parallel.{degree}" for degree in degrees.split()] + others
    want_loss, want = ranks(1)(packed_gradients, run_toml, *[o for o in others if o == WINDOWS])[0]
    loss, gradients = ranks(size)(packed_gradients, run_toml, *overrides)[0]
    assert loss == pytest.approx(want_loss, rel=1e-5)
    for name, gradient in gradients.items():
        error = (gradient - want[name]).abs().max() / want[name].abs().max()
        assert error < 1e-5, (name, error)
