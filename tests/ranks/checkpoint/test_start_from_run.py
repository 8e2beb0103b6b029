"""A run that starts from the weights of another one, on other ranks: the same weights, and nothing else of that run."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from models import ARCHITECTURES
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, eager_model
from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, prepared, train, write_run
from torchtitan_cp.checkpoint.weights import open_saved_model
from torchtitan_cp.cli.check import main as check
from torchtitan_cp.config import load_config
from torchtitan_cp.training.registry import register

STEPS = "--curriculum.stages[0].steps=2"
THETA = "--curriculum.stages[0].rope={theta = 2e6}"
MESHES = {
    "one process": (1, ()),
    "fsdp 2": (2, ()),
    "pp 2 x tp 2": (4, ("--parallel.pp=2", "--parallel.tp=2")),
    "cp 4": (4, ("--parallel.cp=4",)),
}


@pytest.fixture(scope="module")
def first(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a second run, which says nothing of the model but where the first one is."""
    path = write_run(tmp_path_factory.mktemp("second"))
    ranks(2)(train, path, "--parallel.cp=2", STEPS, THETA)
    return second_config(path)


def second_config(path: Path) -> Path:
    folder = path.parent
    lines = [line for line in TINY.splitlines() if not line.startswith(("overrides", "[tokenizer]", 'kind = "bytes"'))]
    text = "\n".join(lines).replace("{folder}/run", "{folder}/second")
    second = folder / "second.toml"
    second.write_text(text.replace('flavor = "debug"', 'checkpoint = "{folder}/run"').format(folder=folder))
    return second


def weights_at_start(path: Path, *overrides: str) -> tuple[dict[str, Tensor], tuple[int, int], list[str], Any]:
    """On a rank: a new run's weights, each whole; its steps and the optimizer's entries; what it logs; its rope."""
    trainer, said = prepared(path, *overrides), list[str]()
    logger, handler = logging.getLogger("torchtitan_cp.training.resume"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        trainer.resume()
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
    own = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for part in trainer.model.parts
        for name, value in part.named_parameters()
    }
    every: list[Any] = [None] * trainer.meshes.pp.size()
    dist.all_gather_object(every, own, group=trainer.meshes.pp.get_group())
    moments = sum(len(optimizer.state) for optimizer in trainer.model.optimizers)
    whole = {name: value for stage in every for name, value in stage.items()}
    return whole, (trainer.progress.step, moments), said, trainer.stages[0].rope


def assert_same_weights(found: dict[str, Tensor], run: Path) -> None:
    saved = open_saved_model(run)
    expected = saved.read([*saved.tensors])
    assert len(expected.keys() - found.keys()) <= 1, "a tied output"
    assert all(torch.equal(found[name], expected[name]) for name in found)


@deep_rows("mesh", [*MESHES], default=["one process", "pp 2 x tp 2"])
def test_weights_are_those_of_the_first_run_bit_for_bit_on_any_mesh(
    ranks: Callable[[int], RankPool], first: Path, mesh: str
) -> None:
    size, overrides = MESHES[mesh]
    found, steps, said, rope = ranks(size)(weights_at_start, first, *overrides)[0]
    assert_same_weights(found, first.parent / "run")
    assert steps == (0, 0)
    assert rope.theta == 2e6, "the first run's, where the stage has none"
    assert said == [f"weights of step 2 from {first.parent}/run/checkpoints/step-2"]


def test_another_rope_is_said_and_a_step_folder_may_be_given(ranks: Callable[[int], RankPool], first: Path) -> None:
    folder = f"--model.checkpoint={first.parent}/run/checkpoints/step-2"
    *_, said, rope = ranks(1)(weights_at_start, first, folder, "--curriculum.stages[0].rope={theta = 1e4}")[0]
    assert rope.theta == 1e4
    assert said[1] == "stage 1 changes the rotary embedding they were trained with: theta 2000000.0 -> 10000.0"


def test_a_run_with_adapters_alone_is_refused(
    ranks: Callable[[int], RankPool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path)
    ranks(1)(train, path, "--lora.rank=4", "--curriculum.stages[0].steps=1")
    assert check([str(second_config(path))]) == 2
    message = capsys.readouterr().err
    assert "is of a run with [lora], whose checkpoints hold adapters alone" in message
    assert "torchtitan-cp export --merge" in message


def test_the_second_run_trains_and_resumes_without_the_first(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path = write_run(tmp_path)
    ranks(1)(train, path, STEPS)
    second = second_config(path)
    assert len(ranks(2)(train, second, STEPS)[0]) == 2
    (tmp_path / "run").rename(tmp_path / "gone")
    resolved = tmp_path / "second" / "config.toml"
    assert len(ranks(1)(train, resolved, "--curriculum.stages[0].steps=3")[0]) == 3
    assert load_config(resolved, []).model.overrides["dim"] == 48


def test_a_model_of_transformers_goes_on_from_a_run(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    eager_model(FAMILIES["Gemma 3"]).save_pretrained(tmp_path / "hub")
    lines = [line for line in TINY.splitlines() if not line.startswith("overrides")]
    ours = f'architecture = "huggingface"\nhub_checkpoint = "{tmp_path}/hub"'
    path = write_run(tmp_path, "\n".join(lines).replace('flavor = "debug"', ours))
    ranks(2)(train, path, STEPS)
    found, *_ = ranks(2)(weights_at_start, second_config(path), "--parallel.cp=2")[0]
    assert_same_weights(found, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model.checkpoint={folder}/none", "model.checkpoint: {folder}/none is not a checkpoint and contains none"),
        ("--model.overrides={{n_layers = 3}}", " is of another model: {{"),
        ("--model.architecture=moe --model.flavor=debug", "is of another model: llama there, moe here"),
        ("--tokenizer.vocab_size=400", "[tokenizer] asks for one that is trained on the corpus"),
    ],
)
def test_another_model_or_tokenizer_is_refused_before_the_corpus_is_read(
    first: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    register(ARCHITECTURES)
    arguments = change.format(folder=first.parent).split(" --")
    arguments = [arguments[0], *(f"--{one}" for one in arguments[1:])]
    assert check([str(first), *arguments]) == 2
    assert message.format(folder=first.parent) in capsys.readouterr().err
