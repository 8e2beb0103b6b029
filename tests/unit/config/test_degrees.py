"""Degrees that follow from the ranks."""

from torchtitan_cp.config.degrees import Degrees, resolve_degrees
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.config.training import Parallel


def degrees_of(parallel: Parallel, ranks: int, **stage: int) -> Degrees:
    return resolve_degrees(parallel, ranks, Stage(**stage), "curriculum.stages[0]")  # type: ignore[arg-type]


def test_what_is_left_goes_to_the_open_axis() -> None:
    assert degrees_of(Parallel(), 6) == Degrees(pp=1, dp_replicate=1, dp_shard=6, cp=1, tp=1)
    assert degrees_of(Parallel(dp_shard=2, cp=-1), 6).cp == 3
    assert degrees_of(Parallel(dp_shard=2, cp=2), 4).fsdp == 4


def test_a_stages_own_degrees_replace_those_of_the_run() -> None:
    own = degrees_of(Parallel(dp_replicate=2, cp=2), 16, tp=2, cp=-1)
    assert own == Degrees(pp=1, dp_replicate=2, dp_shard=1, cp=4, tp=2)
    assert (own.fsdp, own.dp) == (4, 2)
    assert degrees_of(Parallel(dp_replicate=2, cp=2), 16, cp=4) == Degrees(1, 2, 2, 4, 1)
