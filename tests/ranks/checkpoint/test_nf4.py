"""Runs with adapters beside weights in NF4: saved, resumed, evaluated, and exported with the weights they came from."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.support.hub_models import write_groups_start
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.runs import losses, needs_bytes, train
from torchtitan_cp.checkpoint.weights import open_saved_model
from torchtitan_cp.cli.evaluate import evaluate
from torchtitan_cp.cli.generate import load_model
from torchtitan_cp.config import load_config
from torchtitan_cp.parallel.nf4 import NF4Linear, dequantize, quantize
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.training.export import export

pytestmark = needs_bytes
LORA = ("--lora.rank=4", "--lora.base=nf4", "--lora.train=['norm']", "--optimizer.lr=0.02")
STEPS = ("--curriculum.stages[0].steps=6", "--checkpoint.interval=3", "--checkpoint.keep=9")
NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wo": "self_attn.o_proj",
    **{f"feed_forward.{ours}": f"mlp.{theirs}_proj" for ours, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
}


class Run(NamedTuple):
    """A run of six steps on two ranks."""

    path: Path
    keys: list[str]
    losses: list[float]

    @property
    def folder(self) -> Path:
        return self.path.parent

    def stopped_copy(self, name: str) -> list[str]:
        """The keys of a copy of the run as if it had died after step 3."""
        shutil.copytree(self.folder / "run", self.folder / name)
        shutil.rmtree(self.folder / name / "checkpoints" / "step-6")
        return [*self.keys, f"--job.dump_folder={self.folder / name}"]


@pytest.fixture(scope="module")
def run(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> Run:
    path, start = write_groups_start(tmp_path_factory.mktemp("nf4"))
    keys = [*start, *LORA, *STEPS]
    return Run(path, keys, losses(ranks(2)(train, path, *keys)[0]))


@pytest.mark.parametrize("world", [2, 1])
def test_a_run_goes_on_with_the_same_losses_from_adapters_alone(
    ranks: Callable[[int], RankPool], run: Run, world: int
) -> None:
    saved = open_saved_model(run.folder / "run").tensors
    assert all(name.endswith(("lora_a", "lora_b", "norm.weight")) for name in saved)
    assert {dtype for _, dtype in saved.values()} == {torch.float32}
    got = losses(ranks(world)(train, run.path, *run.stopped_copy(f"on-{world}"))[0])
    assert got == (run.losses if world == 2 else pytest.approx(run.losses, rel=1e-4))
    assert run.losses[-1] < run.losses[0]


def test_adapters_beside_nf4_do_not_go_on_beside_bf16(ranks: Callable[[int], RankPool], run: Run) -> None:
    keys = [*run.stopped_copy("other"), "--lora.base=bfloat16"]
    with pytest.raises(RankFailure, match=r"written with lora {'base': 'nf4'}, and .* now gives {'base': 'bfloat16'}"):
        ranks(2)(train, run.path, *keys)


def validation_loss(folder: Path) -> float:
    """On a rank: what `evaluate` finds."""
    saved = open_saved_model(folder, collective=True)
    return evaluate(saved, load_config(folder / "config.toml"), start_ranks(60.0)).loss


def test_evaluation_and_generation_have_the_models_weights_and_a_merge_the_bases(
    ranks: Callable[[int], RankPool], run: Run
) -> None:
    recorded = json.loads((run.folder / "run" / "evaluation.jsonl").read_text().splitlines()[-1])["loss"]
    assert ranks(1)(validation_loss, run.folder / "run")[0] == pytest.approx(recorded, rel=1e-6)
    base = load_file(run.folder / "hub" / "model.safetensors")
    model = load_model(open_saved_model(run.folder / "run"), torch.device("cpu"))
    export(run.folder / "run", run.folder / "whole", merge=True)
    merged, found = load_file(run.folder / "whole" / "model.safetensors"), 0
    for name, layer in model.named_modules():
        if isinstance(layer, NF4Linear):
            _, number, ours = name.split(".", 2)
            theirs = f"model.layers.{number}.{NAMES[ours]}.weight"
            rows = quantize(base[theirs])
            assert torch.equal(layer.nf4, rows)
            added = 32.0 / 4 * (layer.lora_b @ layer.lora_a)  # type: ignore[operator]
            assert added.abs().max() > 0
            torch.testing.assert_close(merged[theirs], base[theirs].float() + added)
            whole = dequantize(rows, layer.nf4_pairs, torch.float32).view_as(added) + added
            x = torch.randn(3, layer.in_features)
            torch.testing.assert_close(layer(x), x @ whole.t())
            found += 1
    assert found == 2 * len(NAMES)
