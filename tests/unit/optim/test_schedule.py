"""Learning rates by hand: warm-up, each shape's end, and stages with and without their own."""

import pytest

from torchtitan_cp.config import names
from torchtitan_cp.config.sections import StageLR
from torchtitan_cp.config.training import LRScheduler, Optimizer
from torchtitan_cp.optim.schedule import LR_SHAPES, LearningRates

PEAK = Optimizer(lr=1.0)


def rates(scheduler: LRScheduler, *stages: tuple[StageLR | None, int]) -> list[float]:
    schedule = LearningRates(PEAK, scheduler, stages)
    return [schedule.at(stage, step) for stage, (_, steps) in enumerate(stages) for step in range(steps)]


def test_every_shape_of_the_config_is_there() -> None:
    assert set(LR_SHAPES) == set(names.LR_SHAPES)


def test_warm_up_climbs_to_the_peak_in_equal_steps() -> None:
    assert rates(LRScheduler(shape="constant", warmup_steps=4), (None, 6)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("shape", sorted(set(LR_SHAPES) - {"constant"}))
def test_a_shape_starts_at_the_peak_falls_and_ends_where_told(shape: str) -> None:
    values = rates(LRScheduler(shape=shape, end_fraction=0.25, decay_fraction=0.5), (None, 11))
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(0.25)
    assert values == sorted(values, reverse=True)


def test_cosine_linear_and_wsd_pass_their_midpoints() -> None:
    settings = {"end_fraction": 0.0, "decay_fraction": 0.4}
    assert rates(LRScheduler(shape="cosine", **settings), (None, 11))[5] == pytest.approx(0.5)
    assert rates(LRScheduler(shape="linear", **settings), (None, 11))[5] == pytest.approx(0.5)
    wsd = rates(LRScheduler(shape="wsd", **settings), (None, 11))
    assert wsd[6] == 1.0
    assert wsd[8] == pytest.approx(0.5)


def test_stages_without_their_own_share_one_curve_around_those_with() -> None:
    shared = LRScheduler(shape="linear", end_fraction=0.0)
    whole = rates(shared, (None, 6))
    split = rates(shared, (None, 2), (StageLR(peak=5.0, shape="constant"), 3), (None, 4))
    assert split[:2] + split[5:] == whole
    assert split[2:5] == [5.0] * 3


def test_a_stage_of_its_own_takes_the_optimizers_peak_by_default() -> None:
    assert rates(LRScheduler(), (StageLR(shape="constant", warmup_steps=2), 3)) == [0.5, 1.0, 1.0]


def test_a_run_of_one_step_and_a_warm_up_longer_than_the_run_are_defined() -> None:
    assert rates(LRScheduler(), (None, 1)) == [1.0]
    assert rates(LRScheduler(warmup_steps=10), (None, 2)) == [0.5, 1.0]


def test_the_shared_curve_counts_the_steps_that_a_stage_took_before_its_gate_opened() -> None:
    stages: list[tuple[StageLR | None, int]] = [(None, 98), (StageLR(), 7), (None, 20)]
    schedule = LearningRates(PEAK, LRScheduler(warmup_steps=8, shape="linear", end_fraction=0.0), stages)
    early = [schedule.at(2, step, {0: 2, 1: 3}) for step in range(20)]
    assert early == rates(LRScheduler(warmup_steps=8, shape="linear", end_fraction=0.0), (None, 22))[2:]
    assert schedule.at(1, 3, {0: 2}) == schedule.at(1, 3)
