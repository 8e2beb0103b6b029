"""What the rest of the code is told about the device."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.ranks import RankPool
from torchtitan_cp.parallel import Device, start_ranks
from torchtitan_cp.parallel.device import find_device

CPU = Device(torch.device("cpu"), "gloo")


def test_without_a_gpu_ranks_share_the_cpu_and_talk_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(3) == CPU


def test_with_gpus_each_local_rank_has_its_own_and_talks_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device(3) == Device(torch.device("cuda", 3), "nccl")


def test_a_random_state_that_is_set_again_gives_the_same_numbers() -> None:
    state = CPU.rng_state()
    first = torch.rand(4)
    assert not torch.equal(torch.rand(4), first)
    CPU.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to compare with")
def test_peak_memory_of_a_cpu_is_the_processs_in_bytes() -> None:
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    assert CPU.peak_memory_bytes() == pytest.approx(int(peak[1]) * 1024, rel=0.01)


def name_at(threads: int) -> str:
    """On a rank: what the device is called."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return CPU.name
    finally:
        torch.set_num_threads(before)


def test_a_cpu_is_named_with_its_threads(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(1)(name_at, 1) == ["cpu, 1 thread a rank"]
    assert ranks(1)(name_at, 2) == ["cpu, 2 threads a rank"]


def place() -> tuple[int, int, str]:
    """On a rank: where it stands; the group that is there already is taken."""
    world = start_ranks(60.0)
    return world.rank, world.size, world.device.device.type


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pool's ranks are on the CPU")
def test_each_rank_knows_its_place(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(place) == [(0, 2, "cpu"), (1, 2, "cpu")]
