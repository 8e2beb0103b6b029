"""Who shares a sequence, and who shares the parameters."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.ranks import RankPool
from torchtitan_cp.parallel import Meshes


def places(degrees: list[int]) -> list[tuple[list[int], list[int]]]:
    """On a rank: for each CP degree, the ranks it shares a sequence with, and those at its place in other sequences."""
    meshes = Meshes("cpu", dist.get_world_size())
    return [
        tuple(dist.get_process_group_ranks(meshes.for_cp(degree)[axis].get_group()) for axis in ("cp", "dp"))
        for degree in degrees
    ]  # type: ignore[misc]


def test_neighbours_in_rank_share_a_sequence_whatever_the_degree(ranks: Callable[[int], RankPool]) -> None:
    alone, pairs, all_four = zip(*ranks(4)(places, [1, 2, 4]), strict=True)
    assert alone == tuple(([rank], [0, 1, 2, 3]) for rank in range(4))
    assert pairs == (([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3]))
    assert all_four == tuple(([0, 1, 2, 3], [rank]) for rank in range(4))


def kept() -> tuple[bool, list[int]]:
    """On a rank: whether a stage that returns to a degree finds its groups again, and who shards the parameters."""
    meshes = Meshes("cpu", dist.get_world_size())
    first = meshes.for_cp(2)
    meshes.for_cp(1)
    return meshes.for_cp(2) is first, dist.get_process_group_ranks(meshes.fsdp.get_group())


def test_groups_are_made_once_and_the_parameters_stay_on_all_ranks(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(kept) == [(True, [0, 1])] * 2


def local_rank_of_cp(degree: int) -> int:
    """On a rank: its place in the CP group."""
    return Meshes("cpu", dist.get_world_size()).for_cp(degree).get_local_rank("cp")


@pytest.mark.parametrize(("degree", "wanted"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (4, [0, 1, 2, 3])])
def test_the_place_in_a_cp_group_follows_the_rank(
    ranks: Callable[[int], RankPool], degree: int, wanted: list[int]
) -> None:
    assert ranks(4)(local_rank_of_cp, degree) == wanted
