"""Who may read a bundle of a bad step."""

import os
from pathlib import Path

import torch

from torchtitan_cp.health.replay import Bundle


def test_the_tensors_of_a_bundle_may_be_read_by_those_who_may_read_the_folder(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        Bundle({}, {"tokens": torch.ones(1)}).write(tmp_path / "step-1")
    finally:
        os.umask(old)
    assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "step-1").iterdir()} == {
        "report.json": 0o640,
        "tensors.safetensors": 0o640,
    }
