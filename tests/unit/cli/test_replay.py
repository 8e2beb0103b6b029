"""Bundles of bad steps that cannot be replayed."""

from pathlib import Path

import pytest
import torch

from torchtitan_cp.cli.replay import main
from torchtitan_cp.health.replay import Bundle


def test_a_bundle_that_is_none_and_one_without_a_module_are_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    assert "does not hold the bundle of a bad step (FileNotFoundError" in capsys.readouterr().err
    report = {"summary": "x", "module": None, "sizes": {"vocab_size": 9}}
    Bundle(report, {"tokens": torch.tensor([[1, 2]]), "labels": torch.tensor([[2, -100]])}).write(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "the bundle holds no module" in capsys.readouterr().err
    (tmp_path / "tensors.safetensors").write_bytes(b"cut")
    assert main([str(tmp_path)]) == 2
    assert "does not hold the bundle of a bad step" in capsys.readouterr().err
