"""Recipes for one GPU and for a node: their plans, searches and walks are what their heads say."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from models import ARCHITECTURES
from tests.support.deep import deep_rows
from tests.support.recipes import FILES, load, ranks_of, walk_on_gpu
from torchtitan_cp.config import Config
from torchtitan_cp.parallel.nf4 import SHARDS_BYTES
from torchtitan_cp.planner.choices import KEYS
from torchtitan_cp.planner.devices import Cluster, make_cluster
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.planner.search import search
from torchtitan_cp.training.registry import register

GIB = 2**30
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("c++") or shutil.which("g++")), reason="needs Linux and a C++ compiler"
)
SMALL = [path for path in FILES if path.stem.endswith(("_one_gpu", "_eight_gpus"))]
NAMES = [path.stem for path in SMALL]
ALONE = [name for name in NAMES if name.endswith("_one_gpu")]
# A walk takes minutes, so of several stages only one is walked: the first, with the length and cp of the last.
LAST = {
    "llama3_1_8b_128k_eight_gpus": ("seq_len=131072", "cp=8"),
    "qwen3_8b_256k_eight_gpus": ("seq_len=262144", "cp=8"),
}


def on_its_gpus(name: str, folder: Path, *overrides: str) -> tuple[Path, Config, Cluster]:
    """The file of a recipe, its config, and the GPUs that its head names."""
    register(ARCHITECTURES)
    (path,) = (path for path in SMALL if path.stem == name)
    return path, load(path, folder, *overrides), make_cluster("h100-80g", ranks_per_node=ranks_of(path))


@deep_rows("name", NAMES, default=[name for name in NAMES if "gemma" not in name])
def test_a_recipe_takes_what_its_head_says_and_a_search_finds_something_as_fast(name: str, tmp_path: Path) -> None:
    path, config, cluster = on_its_gpus(name, tmp_path)
    planned = plan_config(config, cluster)
    assert all(estimate.fits for estimate in planned)
    head = path.read_text(encoding="utf-8").partition("\n[")[0].replace("\n# ", " ")
    said = re.search(r"it takes (\d+) GiB of an H100(?: and (\d+) GiB of its host)?", head)
    rates = re.search(r"\(([^()]+) tokens/s\)", head)
    assert said
    assert rates
    needs = [[need.needed_bytes / GIB for need in estimate.needs] for estimate in planned]
    device, host = (max(values) for values in zip(*needs, strict=True))
    assert device == pytest.approx(int(said[1]), abs=0.6)
    assert said[2] is None or host == pytest.approx(int(said[2]), abs=0.6)
    for rate, estimate in zip(re.findall(r"\d[\d,]*\d", rates[1]), planned, strict=True):
        assert estimate.tokens_per_second == pytest.approx(float(rate.replace(",", "")), rel=0.05)
    found = search(config, cluster).found
    assert found
    assert found.days <= sum(estimate.days for estimate in planned) * 1.001


@deep_rows("name", ALONE, default=[name for name in ALONE if "gemma" not in name])
def test_what_a_search_finds_on_one_gpu_is_what_the_recipe_has(name: str, tmp_path: Path) -> None:
    """So a walk of the recipe is one of the search's answer."""
    _, config, cluster = on_its_gpus(name, tmp_path)
    found = search(config, cluster).found_config()
    for key in KEYS.values():
        section, field = key.split(".")
        assert getattr(getattr(found, section), field) == getattr(getattr(config, section), field), key


@needs_compiler
@pytest.mark.deep
@pytest.mark.xdist_group("jobs/test_page_runs.py")  # early, as it takes minutes
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_walked_with_a_gpus_operations_takes_the_memory_of_its_plan(name: str, tmp_path: Path) -> None:
    """Uncompiled, as blocks are walked."""
    options = ("--compile.enable=false", *(f"--curriculum.stages[0].{key}" for key in LAST.get(name, ())))
    path, config, cluster = on_its_gpus(name, tmp_path, *options)
    if config.lora and config.lora.base == "nf4" and not SHARDS_BYTES:
        pytest.skip("FSDP shards bytes from torch 2.13 on")
    (walked,) = walk_on_gpu(path, cluster.ranks, *options, stages=1)
    assert plan_config(config, cluster)[0].memory.total == pytest.approx(walked, rel=0.10)
