"""Random numbers of a step follow from the step and the rank's role."""

from collections.abc import Callable
from pathlib import Path

import torch

from tests.ranks import RankPool
from tests.runs import TINY, prepared, write_run
from torchtitan_cp.parallel import seed_step


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


def run_and_draw(path: Path, *overrides: str) -> float:
    prepared(path, "--curriculum.stages[0].steps=1", "--checkpoint.enable=false", *overrides).run()
    return torch.initial_seed()


def test_ranks_draw_numbers_of_their_own_and_tensor_parallel_peers_the_same(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_run(tmp_path, TINY)
    for degree, kinds in (("dp_shard", 2), ("cp", 2), ("tp", 1)):
        seeds = ranks(2)(run_and_draw, path, f"--parallel.{degree}=2", f"--job.dump_folder={tmp_path}/{degree}")
        assert len(set(seeds)) == kinds, degree
