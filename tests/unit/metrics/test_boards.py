"""The extra place to watch a run."""

import sys
from pathlib import Path

import numpy as np
import pytest

from torchtitan_cp.config import ConfigError
from torchtitan_cp.metrics import MetricsWriter


def test_without_its_package_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"(?s)metrics.wandb needs the package `wandb`.*torchtitan-cp\[wandb\]"):
        MetricsWriter(tmp_path, after_step=0, tensorboard=False, interval=1, wandb="project")


def test_weights_and_biases_gets_what_tensorboard_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = MetricsWriter(tmp_path, after_step=0, tensorboard=False, interval=1, wandb="project")
    run = writer.boards[0].run
    writer.scalar("train/loss", 2.5, 1)
    writer.image("validation/passkey", np.zeros((4, 4, 3), np.uint8), 2)
    writer.text("stage", "a < b", 3)
    assert run.summary["train/loss"] == 2.5
    assert run.step == 3
    writer.close()
    assert list((tmp_path / "wandb").glob("offline-run-*"))
