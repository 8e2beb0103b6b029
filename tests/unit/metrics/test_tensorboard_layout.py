"""The charts of TensorBoard's first page, and the lines that are runs of their own."""

import math

import numpy as np
import pytest
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from tests.support.step_records import TAGS
from torchtitan_cp.evaluation.result import EvaluationResult, Retrieval
from torchtitan_cp.metrics.tensorboard_layout import GROUPS, is_charted, layout_event, split_line

FOUND = EvaluationResult(
    2.0,
    3.0,
    {"books": 2.0, "code": 2.5},
    [0, 16, 32],
    [3.0, 2.0, 1.0],
    context_gain=0.1,
    stage_loss=1.0,
    turn_losses=[2.0, math.nan, 1.5],
    short_loss_rise=0.0,
    retrieval={
        name: Retrieval(np.ones((1, 1)), (64,), (0.0,)) for name in ("passkey", "multi_key", "variable_tracking")
    },
)
KNOWN = [*sorted(TAGS), *(f"validation/{name}" for name in FOUND.scalars(64)), "gate/loss", "gate/loss_wanted"]


def layout_of(*tags: str) -> Layout:
    event = layout_event(dict.fromkeys(tags))
    return Layout.FromString(event.summary.value[0].tensor.string_val[0])


def test_every_kind_of_chart_has_tags_that_are_recorded_and_its_order_is_that_of_the_page() -> None:
    layout = layout_of(*(split_line(tag)[0] for tag in KNOWN))
    assert [group.title for group in layout.category] == [group.title for group in GROUPS]
    assert [group.closed for group in layout.category] == [False, False, True, True, True, True]
    for group, category in zip(GROUPS, layout.category, strict=True):
        titles = [chart.title for chart in category.chart]
        kinds = [kind.title for kind in group.charts]
        if group.sparse:  # TensorBoard reverses them
            titles.reverse()
        assert [title for title in titles if title in kinds] == [kind for kind in kinds if "{}" not in kind]
        assert len(titles) >= len(kinds)


def test_few_lines_of_a_chart_are_of_one_run_as_those_have_one_color() -> None:
    for category in layout_of(*(split_line(tag)[0] for tag in KNOWN)).category:
        for chart in category.chart:
            assert len(chart.multiline.tag) + len(chart.margin.series) == (2 if chart.title == "gate: loss" else 1)


def test_margins_of_a_line_of_few_points_are_the_value_itself() -> None:
    [category] = layout_of("validation/context_gain").category
    [series] = category.chart[0].margin.series
    assert {series.value, series.lower, series.upper} == {"validation/context_gain"}


def test_with_one_source_its_loss_is_the_loss() -> None:
    for tags, shown in (
        (["validation/loss"], "validation/loss"),
        (["validation/loss", "validation/loss_by_source"], "validation/loss_by_source"),
    ):
        [chart] = layout_of(*tags).category[0].chart
        assert (chart.title, chart.margin.series[0].value) == ("held-out loss, by source", shown)


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("validation/loss_by_source/a/b (c)", ("validation/loss_by_source", "source-a%2Fb (c)")),
        ("validation/loss_at_end/far", ("validation/loss_at_end", "far-end")),
        ("validation/multi_key_by_length/4K", ("validation/multi_key_by_length", "prompts-4K")),
        ("validation/loss", ("validation/loss", "")),
        ("loss_by_source/a (b)", ("loss_by_source/a (b)", "")),
    ],
)
def test_the_last_part_of_some_tags_is_a_run(tag: str, expected: tuple[str, str]) -> None:
    assert split_line(tag) == expected


def test_no_chart_has_a_tag_with_a_bracket_from_which_tensorboard_would_read_the_name_of_a_run() -> None:
    assert not is_charted("loss_by_source/a (b)")
    assert all("(" not in tag for tag in KNOWN if is_charted(split_line(tag)[0]))
