"""What a run cannot do is said before its corpus is prepared, and `check` says it as the ranks would."""

import random
import shutil
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn

from models import ARCHITECTURES
from tests.support.damaged_weights import DAMAGES, TIED
from tests.support.deep import deep_rows
from tests.support.hub_models import write_start
from tests.support.rank_pool import RankPool
from tests.support.runs import write_run
from torchtitan_cp.attention.kernels import KERNELS
from torchtitan_cp.checkpoint.hub import load_parts
from torchtitan_cp.cli.check import check_run
from torchtitan_cp.config import Config, UserError, load_config
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.training import registry, trainer
from torchtitan_cp.training.resolve import resolve_run

# Architecture, family, size of the files, draws of each damage.
DEFAULT = [("llama", "llama, tied", "40KB", 1), ("huggingface", "qwen3", "5GB", 1)]
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


def load(config: Config, model: nn.Module) -> None:
    """Fill a model, as a run does after the corpus is prepared."""
    names = [name for name, _ in model.named_parameters()]
    load_parts(registry.hub_folder(config.model), [model], names, registry.hub_of(config.model))


def verdicts(path: Path, missing: str, *overrides: str) -> tuple[str, str]:
    """On a rank: what check and ranks say of a config where a package is missing."""
    registry.register(ARCHITECTURES)
    config = load_config(path, overrides)
    with patch.dict(sys.modules, {missing: None} if missing else {}):
        return said_by(lambda: check_run(config, 1)), said_by(lambda: start(config))


@pytest.mark.parametrize(
    ("overrides", "missing", "says"),
    [
        *(
            pytest.param(
                [f"--context_parallel.kernel={kernel}"],
                "",
                "" if kernel in ("cpu", "reference") else f"context_parallel.kernel = '{kernel}' cannot run",
                id=kernel,
            )
            for kernel in KERNELS
        ),
        (["--training.float8=rowwise"], "", "training.float8 needs a CUDA device of compute capability 8.9"),
        (["--optimizer.state=8bit"], "torchao.optim", "optimizer.state = '8bit' needs the package `torchao`"),
        (["--metrics.wandb=mine"], "wandb", "metrics.wandb needs the package `wandb`"),
        (["--optimizer.groups=[{match = 'router'}]"], "", "optimizer.groups[0].match = 'router' matches no parameter"),
        (["--model.overrides.vocab_size=200"], "", "the model has 200 embeddings and the tokenizer 257 pieces"),
        (["--checkpoint.enable=false"], "", "holds checkpoints, and checkpoint.enable = false would begin anew"),
    ],
)
def test_what_ranks_refuse_is_refused_before_the_corpus_is_prepared_and_by_the_check(
    ranks: Callable[[int], RankPool], tmp_path: Path, overrides: list[str], missing: str, says: str
) -> None:
    path = write_run(tmp_path)
    if "--checkpoint.enable=false" in overrides:
        (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    [(check, started)] = ranks(1)(verdicts, path, missing, *overrides)
    assert (check, started) == (check, check or CORPUS)
    assert says in check
    assert bool(says) == bool(check)
    assert "\n  fix: " in check or not says


def logged_as_gpu(path: Path, *overrides: str) -> list[str]:
    """On a rank: what a start logs of a config that was resolved for GPUs."""
    registry.register(ARCHITECTURES)
    config = resolve_run(load_config(path, overrides), dist.get_world_size(), device="cuda")
    with patch.object(trainer, "resolve_run", return_value=config), patch.object(trainer.logger, "info") as info:
        assert said_by(lambda: start(config.config)) == CORPUS
    return [call.args[0] % call.args[1:] for call in info.call_args_list]


def test_a_start_says_in_a_line_why_nothing_is_compiled(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path, split = write_run(tmp_path), ("--parallel.pp=2", "--parallel.pp_schedule=interleaved_zero_bubble")
    for lines in ranks(2)(logged_as_gpu, path, *split, "--model.overrides.n_layers=4"):
        assert lines == [
            "nothing is compiled: parallel.pp_schedule = 'interleaved_zero_bubble' splits the backward of a block, "
            "which a compiled block cannot"
        ]
    assert ranks(1)(logged_as_gpu, path) == [[]]


def verdicts_on_damage(path: Path, overrides: list[str], draws: int) -> list[tuple[str, bool, str, str, str]]:
    """On a rank, for each damage: its name, whether a run can start, and what check, ranks and the loading say."""
    registry.register(ARCHITECTURES)
    config, found = load_config(path, overrides), []
    args, hub = registry.model_args_of(config.model), Path(config.model.hub_checkpoint)
    model, empty = (
        registry.architecture(config.model).build(args, registry.NO_ATTENTION),
        registry.empty_model(config.model, args),
    )
    kinds = DAMAGES | (TIED if model.output.weight is model.tok_embeddings.weight else {})
    whole = hub.rename(hub.with_name("whole"))
    with patch.object(registry, "empty_model", return_value=empty):  # making it takes most of a check
        for number, (name, (damage, sound)) in product(range(draws), kinds.items()):
            shutil.rmtree(hub, ignore_errors=True)
            shutil.copytree(whole, hub)
            damage(hub, random.Random(f"{name} {number}"))
            check, started = said_by(lambda: check_run(config, 1)), said_by(lambda: start(config))
            found.append((name, sound, check, started, said_by(lambda: load(config, model))))
    return found


@deep_rows(
    ("architecture", "family", "shard_size", "draws"),
    [*DEFAULT, *product(("llama", "huggingface"), ("llama", "llama, tied", "qwen3"), ("5GB", "40KB"), (8,))],
    default=DEFAULT,
)
def test_weights_that_cannot_be_loaded_are_refused_before_the_corpus_is_prepared_with_the_same_words(
    ranks: Callable[[int], RankPool], tmp_path: Path, architecture: str, family: str, shard_size: str, draws: int
) -> None:
    path = write_start(tmp_path, family, shard_size)
    overrides = ["--model.flavor=", "--model.overrides={}", f"--model.architecture={architecture}"]
    [found] = ranks(1)(verdicts_on_damage, path, overrides, draws)
    for name, sound, check, started, loaded in found:
        if sound:
            assert (check, started, loaded) == ("", CORPUS, ""), name
        else:
            assert check == started == loaded, name
            assert check.startswith("model.hub_checkpoint: "), name
            assert "\n  fix: " in check, name
