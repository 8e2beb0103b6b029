"""Checkpoints are complete or absent, the newest complete one is found, and only `keep` stay."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks import RankPool
from torchtitan_cp.checkpoint import Checkpoints, Progress
from torchtitan_cp.checkpoint.store import check_identity
from torchtitan_cp.config import ConfigError


def make(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def run_round(folder: Path) -> list[str]:
    checkpoints = Checkpoints(folder, keep=2)
    model, optimizer = make(1.0)
    for step in (10, 9, 20):
        checkpoints.save(Progress(step=step, cursor=7), [model], [optimizer])
    names = sorted(path.name for path in folder.iterdir())
    found = checkpoints.read_progress()
    assert found is not None
    path, progress = found
    assert (path.name, progress.step, progress.cursor) == ("step-20", 20, 7)
    other, other_optimizer = make(5.0)
    checkpoints.load(path, [other], [other_optimizer])
    assert torch.equal(other.weight, model.weight)
    first, second = (next(iter(o.state.values()))["exp_avg"] for o in (optimizer, other_optimizer))
    assert torch.equal(first, second)
    return names


def test_the_newest_are_kept_and_read_back_whole(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    assert ranks(1)(run_round, tmp_path)[0] == ["step-10", "step-20"]


def test_what_is_not_complete_is_not_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.read_progress() is None
    for name, files in {
        "step-5": (".metadata", "progress.json"),
        "step-6": (".metadata",),
        "step-7": ("progress.json",),
        "step-8.partial": (".metadata", "progress.json"),
        "step-x": (".metadata", "progress.json"),
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text(json.dumps({"step": 5}))
    assert [step for step, _ in checkpoints.complete()] == [5]


def test_going_on_with_another_model_or_other_data_names_what_differs() -> None:
    check_identity({"data": "abc", "seed": 1}, {"data": "abc", "seed": 1}, Path("step-1"))
    with pytest.raises(ConfigError, match=r"step-1 was written with data abc, and the config now gives xyz"):
        check_identity({"data": "abc"}, {"data": "xyz"}, Path("step-1"))
