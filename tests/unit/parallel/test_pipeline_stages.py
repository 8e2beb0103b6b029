"""Which stage has which layers, and what a pipeline refuses."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.training import Parallel
from torchtitan_cp.parallel.pipeline_stages import bubble_fraction, plan_pipeline, split_layers


@given(st.data())
def test_the_dearest_stage_is_as_cheap_as_any_split_makes_it(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    spans = split_layers(costs, stages)
    assert [first for first, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == len(costs)
    assert all(first < stop for first, stop in spans)

    def dearest(edges: list[int]) -> float:
        return max(sum(costs[first:stop]) for first, stop in itertools.pairwise([0, *edges, len(costs)]))

    best = min(dearest(list(cuts)) for cuts in itertools.combinations(range(1, len(costs)), stages - 1))
    assert dearest([stop for _, stop in spans[:-1]]) == pytest.approx(best)


def test_stages_go_round_the_ranks_or_there_and_back() -> None:
    costs = [1.0] * 8
    assert plan_pipeline(Parallel(), 1, costs).layers == ((0, 8),)
    plain = plan_pipeline(Parallel(), 2, costs)
    assert (plain.layers, plain.owner) == (((0, 4), (4, 8)), (0, 1))
    looped = plan_pipeline(Parallel(pp_schedule="interleaved_1f1b"), 2, costs)
    assert (looped.owner, looped.of_rank(1)) == ((0, 1, 0, 1), [1, 3])
    three = Parallel(pp_schedule="interleaved_1f1b", pp_stages_per_rank=3)
    assert plan_pipeline(three, 2, costs).owner == (0, 1, 0, 1, 0, 1)


def test_a_v_goes_back_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_cp.parallel.pipeline_stages.SPLITS_ANY_BACKWARD", True)
    assert plan_pipeline(Parallel(pp_schedule="zbv_zero_bubble"), 3, [1.0] * 6).owner == (0, 1, 2, 2, 1, 0)
    monkeypatch.setattr("torchtitan_cp.parallel.pipeline_stages.SPLITS_ANY_BACKWARD", False)
    with pytest.raises(ConfigError, match=r"(?s)'zbv_zero_bubble' needs torch 2.13.*use 1f1b or inter"):
        plan_pipeline(Parallel(pp_schedule="zbv_zero_bubble"), 3, [1.0] * 6)


def test_an_output_that_costs_as_much_as_layers_has_fewer_beside_it() -> None:
    assert plan_pipeline(Parallel(), 2, [1.0] * 5 + [5.0]).layers == ((0, 5), (5, 6))


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        (Parallel(), 9, r"9 ranks x 1 pipeline stages is longer than the model's 8 layers.*lower parallel.pp"),
        (Parallel(pp_stages_per_rank=2), 2, r"pp_stages_per_rank = 2, and 1f1b takes 1.*use 1, or another"),
        (Parallel(pp_schedule="interleaved_1f1b", pp_stages_per_rank=1), 2, "takes 2 or more"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_way_to_mend_it(settings: Parallel, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        plan_pipeline(settings, ranks, [1.0] * 8)


def test_the_bubble_is_the_textbook_share() -> None:
    assert bubble_fraction(Parallel(), 4, 1, 12) == pytest.approx(3 / 15)
    assert bubble_fraction(Parallel(pp_schedule="interleaved_1f1b"), 4, 2, 12) == pytest.approx(3 / 27)
    assert bubble_fraction(Parallel(), 1, 1, 5) == 0
