"""The device of a rank: its random numbers, memory that it gives back, and starts that are refused."""

import pytest
import torch

from torchtitan_cp.config import ConfigError
from torchtitan_cp.runtime.device import Device, seed_step, start_ranks


def drawn(*step: object) -> float:
    seed_step(*step)  # type: ignore[arg-type]
    return torch.rand(()).item()


def test_a_step_draws_the_same_numbers_again_and_another_one_others() -> None:
    numbers = [
        drawn(0, 0, 5, (0, 0)),
        drawn(1, 0, 5, (0, 0)),
        drawn(0, 1, 5, (0, 0)),
        drawn(0, 0, 6, (0, 0)),
        drawn(0, 0, 5, (1, 0)),
        drawn(0, 0, 5, (0, 1)),
    ]
    assert len(set(numbers)) == len(numbers)
    assert drawn(0, 0, 5, (0, 0)) == numbers[0]


@pytest.mark.parametrize(("kind", "emptied"), [("cpu", []), ("cuda", [()])])
def test_a_gpu_gives_memory_back_that_torch_keeps(
    kind: str, emptied: list[tuple[()]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[()]] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda *arguments: calls.append(arguments))
    Device(torch.device(kind), "gloo").release_memory()
    assert calls == emptied


def test_more_ranks_than_gpus_are_refused_before_they_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        start_ranks(1.0)
    assert error.value.message == "each rank needs a GPU of its own, and this node has 1 for 2 ranks"
    assert "NPROC=1" in error.value.fix
    assert "CUDA_VISIBLE_DEVICES=''" in error.value.fix


def test_a_process_that_no_launcher_started_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="no launcher started this process"):
        start_ranks(10.0)
