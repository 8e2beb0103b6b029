"""Weights & Biases as a sink."""

import sys
from pathlib import Path

import numpy as np
import pytest

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.run import Metrics
from torchtitan_cp.metrics.logger import MetricsLogger
from torchtitan_cp.metrics.wandb_sink import WandbSink


def test_without_its_package_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"(?s)metrics.wandb needs the package `wandb`.*torchtitan-cp\[wandb\]"):
        WandbSink("project", tmp_path)


def test_a_run_that_it_does_not_open_is_refused_with_the_way_to_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"(?s)metrics.wandb = 'project': .*No API key.*fix: log in with `wandb log"):
        WandbSink("project", tmp_path)


def test_weights_and_biases_gets_what_tensorboard_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for parent in ("one", "other"):
        (tmp_path / parent / "run").mkdir(parents=True)
        sink = WandbSink("project", tmp_path / parent / "run")
        ids.append(sink.run.id)
        sink.close()
    assert len(set(ids)) == 2
    sink = WandbSink("project", tmp_path)
    sink.scalars({"train/loss": 2.5, "train/lr": 1e-3}, 1)
    sink.image("validation/passkey", np.zeros((4, 4, 3), np.uint8), 2)
    sink.text("stage", "a < b", 3)
    assert sink.run.summary["train/loss"] == 2.5
    assert sink.run.summary["train/lr"] == 1e-3
    assert sink.run.step == 3

    def fail(*_: object, **__: object) -> None:
        raise sink.wandb.errors.CommError("the service is gone")

    logger = MetricsLogger(Metrics(), total_steps=1, done=0, enabled=False)
    logger.sinks.append(sink)
    with monkeypatch.context() as broken:
        broken.setattr(sink.run, "log", fail)
        logger.scalars({"train/loss": 2.0}, 4)
    assert sink not in logger.sinks
    sink.close()
    assert list((tmp_path / "wandb").glob("offline-run-*"))
