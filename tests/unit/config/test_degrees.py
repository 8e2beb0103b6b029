"""Degrees that follow from the ranks."""

from torchtitan_cp.config.degrees import Degrees, resolve_degrees
from torchtitan_cp.config.training import Parallel


def test_what_is_left_goes_to_the_open_axis() -> None:
    assert resolve_degrees(Parallel(), 6) == Degrees(pp=1, dp_replicate=1, dp_shard=6, cp=1, tp=1)
    assert resolve_degrees(Parallel(dp_shard=2, cp=-1), 6).cp == 3
    assert resolve_degrees(Parallel(dp_shard=2, cp=2), 4).fsdp == 4
