"""Random numbers of a step follow from the rank's coordinate, and what gloo's groups do."""

import gc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from tests.support.rank_pool import RankPool, backend_of, rank_device
from tests.support.runs import TINY, prepared, write_run
from torchtitan_cp.config import ConfigError
from torchtitan_cp.runtime.device import freeze_long_lived_objects
from torchtitan_cp.runtime.gloo import _interfaces
from torchtitan_cp.training import trainer


def run_and_draw(path: Path, *overrides: str) -> float:
    gc.unfreeze()
    with patch.object(trainer, "freeze_long_lived_objects", freeze_long_lived_objects):  # a pool's ranks leave it out
        prepared(path, "--curriculum.stages[0].steps=1", "--checkpoint.enable=false", *overrides).run()
    # What was imported is not looked through while others wait.
    assert gc.get_freeze_count() > 100_000
    return torch.initial_seed()


def test_ranks_draw_numbers_of_their_own_and_tensor_parallel_peers_the_same(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_run(tmp_path, TINY)
    for degree, kinds in (("dp_shard", 2), ("cp", 2), ("tp", 1)):
        seeds = ranks(2)(run_and_draw, path, f"--parallel.{degree}=2", f"--job.dump_folder={tmp_path}/{degree}")
        assert len(set(seeds)) == kinds, degree


def threads_of_groups() -> list[int]:
    """On a rank: of the default group and of a mesh's."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("one", "all"))
    groups = [dist.group.WORLD, mesh.get_group("one"), mesh.get_group("all")]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]  # type: ignore[union-attr]
    assert all(isinstance(backend, distributed_c10d.ProcessGroupGloo) for backend in backends)
    return [backend.options._threads for backend in backends]  # type: ignore[attr-defined]


def test_gloo_groups_run_one_collective_at_a_time(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(threads_of_groups) == [[1, 1, 1]] * 2


def many_in_flight(rounds: int) -> bool:
    """On a rank: several collectives of six groups at once, which two threads of a group do not survive."""
    size = dist.get_world_size()
    names = [dist.new_group(list(range(size))).group_name for _ in range(6)]
    gather, wait = torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor
    parts = [torch.full((count,), float(dist.get_rank())) for count in (3, 17, 64, 1000, 48, 96, 7, 5)]
    for _ in range(rounds):
        started = [(part, gather(part, size, name)) for part in parts for name in names]
        for part, whole in started:
            want = torch.arange(float(size)).repeat_interleave(len(part))
            if not torch.equal(wait(whole), want):
                return False
    return True


def test_many_collectives_in_flight_damage_nothing(ranks: Callable[[int], RankPool]) -> None:
    assert all(ranks(4)(many_in_flight, 60))


def group_over(interface: str) -> str:
    """On a rank: what a gloo group says of a network interface."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("GLOO_SOCKET_IFNAME", interface)
        try:
            dist.new_group(backend="gloo")
        except ConfigError as error:
            return str(error)
    return "made"


def test_gloo_goes_by_the_interface_that_the_environment_names(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(1)(group_over, "lo") == ["made"]
    assert "nosuch0" in ranks(1)(group_over, "nosuch0")[0]
    assert ranks(1)(group_over, "") == ["made"]


@pytest.mark.parametrize(
    ("for_gloo", "for_nccl", "chosen"),
    [("a,b", "lo", ["a", "b"]), (None, "lo", ["lo"]), (None, "l", []), (None, "^lo", []), (None, None, [])],
)
def test_gloo_goes_by_nccls_interface_if_it_has_none_of_its_own_and_that_is_named_in_full(
    for_gloo: str | None, for_nccl: str | None, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GLOO_SOCKET_IFNAME", for_gloo), ("NCCL_SOCKET_IFNAME", for_nccl)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    assert _interfaces() == chosen


def device_of_rank() -> tuple[str, str, bool]:
    return dist.get_backend(), rank_device().type, torch.cuda.is_available()


def test_a_pool_is_on_nccl_where_it_is_asked_for_and_there_is_a_gpu_a_rank(
    ranks: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("TEST_DEVICE", raising=False)
    assert [backend_of(size) for size in (1, 2, 3)] == ["gloo"] * 3
    assert ranks(2)(device_of_rank) == [("gloo", "cpu", False)] * 2
    monkeypatch.setenv("TEST_DEVICE", "cuda")
    assert [backend_of(size) for size in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert rank_device().type == "cpu", "of pytest's own process"
