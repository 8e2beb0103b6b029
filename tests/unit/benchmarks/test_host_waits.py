"""What counts as a wait of the host in the middle of a step, and where it is said to be."""

import warnings
from typing import Any

import pytest
import torch

from benchmarks import host_waits
from torchtitan_cp.health import monitor
from torchtitan_cp.training.trainer import Trainer


def test_waits_from_the_third_step_on_and_before_its_report_are_noted_with_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def synchronize() -> None:  # as torch's operations do it
        if modes[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    def a_step_that_waits(trainer: Any, batches: Any) -> Any:
        synchronize()
        return monitor.gather_rows(batches)

    monkeypatch.setattr(Trainer, "forward_backward", a_step_that_waits)
    monkeypatch.setattr(monitor, "gather_rows", lambda own: synchronize())
    with host_waits.noted_waits() as places:
        for _ in range(4):
            Trainer.forward_backward(None, None)  # type: ignore[arg-type]
    assert len(places) == 2
    assert all("test_host_waits.py" in place and " a_step_that_waits < " in place for place in places)
    assert modes[-1] == "default"
