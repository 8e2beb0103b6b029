"""Runs with adapters are saved without their frozen weights, and go on from those alone that they were trained on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.support.hub_models import write_start
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.runs import losses, train
from torchtitan_cp.checkpoint.weights import open_saved_model

STEPS = "--curriculum.stages[0].steps=6"
LORA = ("--lora.rank=4", "--lora.train=['norm']", STEPS, "--checkpoint.interval=3", "--checkpoint.keep=9")
MOMENTS = 2


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("adapters"), "llama")


@pytest.fixture(scope="module")
def straight(ranks: Callable[[int], RankPool], run_toml: Path) -> list[float]:
    return losses(ranks(2)(train, run_toml, f"--job.dump_folder={run_toml.parent / 'straight'}", *LORA)[0])


def stopped_copy(run_toml: Path, name: str) -> str:
    """A copy of the straight run as if it had died after step 3; the key that names its folder."""
    folder = run_toml.parent / name
    shutil.copytree(run_toml.parent / "straight", folder)
    shutil.rmtree(folder / "checkpoints" / "step-6")
    return f"--job.dump_folder={folder}"


def test_a_checkpoint_holds_adapters_and_what_is_trained_whole_with_their_moments(
    run_toml: Path, straight: list[float]
) -> None:
    saved = open_saved_model(run_toml.parent / "straight")
    dim, kv, ffn, layers, rank = 48, 24, 96, 4, 4
    adapters = layers * rank * ((dim + dim) * 2 + (dim + kv) * 2 + (dim + ffn) * 3)
    assert {name.rpartition(".")[2] for name in saved.tensors} == {"lora_a", "lora_b", "weight"}
    assert {name for name in saved.tensors if name.endswith("weight")} == {
        "norm.weight",
        *(f"layers.{number}.{norm}.weight" for number in range(layers) for norm in ("attention_norm", "ffn_norm")),
    }
    trained = adapters + (2 * layers + 1) * dim
    assert sum(size.numel() for size, _ in saved.tensors.values()) == trained
    assert {dtype for _, dtype in saved.tensors.values()} == {torch.float32}
    entries = saved.reader.table.state_dict_metadata.values()
    stored = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    # Each parameter has a step count.
    assert sum(entry.size.numel() for entry in stored) == trained * (1 + MOMENTS) + len(saved.tensors)
    base = saved.progress.identity["base weights"]
    assert isinstance(base, dict)
    assert base["path"] == str(run_toml.parent / "hub")


@pytest.mark.parametrize(("name", "degrees", "tolerance"), [("same", [], 0.0), ("tp", ["--parallel.tp=2"], 1e-4)])
def test_a_run_goes_on_from_its_adapters(
    ranks: Callable[[int], RankPool],
    run_toml: Path,
    straight: list[float],
    name: str,
    degrees: list[str],
    tolerance: float,
) -> None:
    lines = ranks(2)(train, run_toml, stopped_copy(run_toml, name), *LORA, *degrees)[0]
    assert len(lines) == len(straight)
    assert losses(lines) == (pytest.approx(straight, rel=tolerance) if tolerance else straight)
    assert straight[-1] < straight[0]


@pytest.mark.parametrize(
    ("name", "keys", "wanted"),
    [
        ("other", [], r"written with base weights .*'digest': .*and the config now gives .*'digest': "),
        ("gone", [], r"hold adapters alone, and the weights that they adapt are missing: .* has neither model.safe"),
        ("rank", ["--lora.rank=2"], r"was written with lora {'rank': 4}, and the config now gives {'rank': 2}"),
    ],
)
def test_other_weights_and_other_settings_are_refused(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float], name: str, keys: list[str], wanted: str
) -> None:
    base = run_toml.parent / f"hub-{name}"
    shutil.copytree(run_toml.parent / "hub", base)
    weights = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    if name != "gone":
        changed = "model.layers.2.mlp.down_proj.weight"
        weights[changed] = weights[changed] + 1.0 * (name == "other")
        save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    folder = stopped_copy(run_toml, f"refused-{name}")
    with pytest.raises(RankFailure, match=wanted):
        ranks(2)(train, run_toml, folder, *LORA, f"--model.hub_checkpoint={base}", *keys)


def test_adapters_do_not_go_on_beside_fresh_weights_nor_the_other_way_round(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    fresh, folder = "--model.load_weights=false", f"--job.dump_folder={run_toml.parent / 'fresh'}"
    with pytest.raises(
        RankFailure, match=r"was written with base weights .*'digest': .*and the config now gives fresh"
    ):
        ranks(2)(train, run_toml, stopped_copy(run_toml, "beside-fresh"), *LORA, fresh)
    ranks(2)(train, run_toml, folder, *LORA, fresh, "--curriculum.stages[0].steps=3")
    with pytest.raises(RankFailure, match=r"was written with base weights fresh, and the config now gives .*'digest'"):
        ranks(2)(train, run_toml, folder, *LORA)


def test_a_run_that_trained_all_weights_is_not_continued_by_adapters(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    folder = f"--job.dump_folder={run_toml.parent / 'whole'}"
    ranks(1)(train, run_toml, folder, STEPS)
    with pytest.raises(RankFailure, match=r"was written with lora none, and the config now gives {'rank': 4"):
        ranks(1)(train, run_toml, folder, *LORA)
