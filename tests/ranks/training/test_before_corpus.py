"""What a run cannot do is said before its corpus is prepared, and `check` says it as the ranks would."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from models import ARCHITECTURES
from tests.support.damaged_weights import DAMAGES, TIED
from tests.support.deep import deep_rows
from tests.support.hub_models import write_start
from tests.support.rank_pool import RankPool
from tests.support.runs import write_run
from torchtitan_cp.checkpoint.hub import load_parts
from torchtitan_cp.cli.check import preflight
from torchtitan_cp.config import Config, ConfigError, UserError, load_config
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.training import registry, trainer

CORPUS = "the corpus would be prepared"


def said_by(work: Callable[[], object]) -> str:
    try:
        work()
    except (UserError, InterruptedError) as error:
        return str(error)
    return ""


def start(config: Config) -> None:
    """On a rank: begin as a run does, up to the corpus."""
    world = start_ranks(60.0)
    with patch.object(trainer, "prepare_corpus", side_effect=InterruptedError(CORPUS)):
        trainer.Trainer(config, world)


def load(config: Config) -> None:
    """Fill the model, as a run does after the corpus is prepared."""
    args = registry.model_args_of(config.model)
    model = registry.architecture(config.model).build(args, None)
    names = [name for name, _ in model.named_parameters()]
    load_parts(registry.hub_folder(config.model), [model], names, registry.hub_of(config.model))


def verdicts_on_damage(path: Path, overrides: list[str], seeds: range) -> list[tuple[str, bool, str, str, str]]:
    """On a rank, for each damage: its name, whether a run can start, and what check, ranks and the loading say."""
    registry.register(ARCHITECTURES)
    config, found = load_config(path, overrides), []
    hub = Path(config.model.hub_checkpoint)
    whole = hub.rename(hub.with_name("whole"))
    tied = registry.empty_model(
        config.model, registry.model_args_of(load_config(path, [*overrides, f"--model.hub_checkpoint={whole}"]).model)
    )
    kinds = DAMAGES | (TIED if tied.output.weight is tied.tok_embeddings.weight else {})
    for seed in seeds:
        for name, (damage, sound) in kinds.items():
            shutil.rmtree(hub, ignore_errors=True)
            shutil.copytree(whole, hub)
            damage(hub, random.Random(f"{name} {seed}"))
            check = said_by(lambda: preflight(config, 1))
            found.append((name, sound, check, said_by(lambda: start(config)), said_by(lambda: load(config))))
    return found


@deep_rows(
    ("architecture", "family", "shard_size"),
    [
        (architecture, family, size)
        for architecture in ("llama", "huggingface")
        for family in ("llama", "llama, tied", "qwen3")
        for size in ("5GB", "40KB")
    ],
    default=[("llama", "llama, tied", "40KB"), ("huggingface", "qwen3", "5GB")],
)
def test_weights_that_cannot_be_loaded_are_refused_before_the_corpus_is_prepared_with_the_same_words(
    ranks: Callable[[int], RankPool],
    tmp_path: Path,
    architecture: str,
    family: str,
    shard_size: str,
    request: pytest.FixtureRequest,
) -> None:
    path = write_start(tmp_path, family, shard_size)
    overrides = ["--model.flavor=", "--model.overrides={}", f"--model.architecture={architecture}"]
    [found] = ranks(1)(
        verdicts_on_damage, path, overrides, range(8) if request.node.get_closest_marker("deep") else range(1)
    )
    for name, sound, check, started, loaded in found:
        if sound:
            assert (check, started, loaded) == ("", CORPUS, ""), name
        else:
            assert check == started == loaded, name
            assert check.startswith("model.hub_checkpoint: "), name
            assert "\n  fix: " in check, name
