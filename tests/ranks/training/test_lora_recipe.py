"""train_configs/lora_on_cpu.toml goes on from the quickstart's export, and leaves a map, a picture and adapters."""

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.pages import REPOSITORY
from tests.support.rank_pool import RankPool
from tests.support.runs import train
from torchtitan_cp.config import load_config
from torchtitan_cp.training.export import export

QUICKSTART, RECIPE = (REPOSITORY / "train_configs" / name for name in ("quickstart.toml", "lora_on_cpu.toml"))


def short(path: Path, folder: Path) -> list[str]:
    """The words that make a run of two steps a stage in this folder."""
    config = load_config(path, [])
    stages = [f"--curriculum.stages[{number}].steps=2" for number, _ in enumerate(config.curriculum.stages)]
    few = ("--evaluation.passkey.trials=1", "--evaluation.tokens=4096", "--evaluation.max_share=1.0")
    return [*stages, *few, f"--job.dump_folder={folder}", f"--data.cache_folder={folder.parent / 'cache'}"]


def train_and_listen(path: Path, *overrides: str) -> tuple[int, str]:
    """On a rank: how many steps were recorded, and what was printed."""
    with redirect_stdout(StringIO()) as printed:
        return len(train(path, *overrides)), printed.getvalue()


@pytest.mark.deep
def test_adapters_are_trained_on_the_first_stage_of_the_quickstart(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    quickstart, base, run, out = (tmp_path / name for name in ("quickstart", "base", "run", "adapter"))
    ranks(2)(train, QUICKSTART, *short(QUICKSTART, quickstart), "--metrics.tensorboard=false")
    export(quickstart / "checkpoints" / "step-2", base)
    steps, printed = ranks(2)(train_and_listen, RECIPE, *short(RECIPE, run), f"--model.hub_checkpoint={base}")[0]
    stages = load_config(RECIPE, []).curriculum.stages
    assert steps == 2 * len(stages)
    found = printed[printed.index("Keys found in the upper half") :].splitlines()
    rows = [line.split()[0] for line in found[2 : 3 + len(stages)]]
    assert rows == ["step", *(str(stage.seq_len) for stage in stages)], "the base model comes first"
    assert (run / "keys_found.png").stat().st_size > 10_000
    export(run, out)
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    names = load_file(out / "adapter_model.safetensors")
    assert {name.rpartition("layers.")[2].split(".")[0] for name in names if ".lora_A." in name} == {"0", "1"}
