"""What figures are drawn from, and that each can be drawn."""

import importlib
import io
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.oracle import allowed
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.metrics.figures import (
    DPI,
    attention_owners,
    draw_attention_owners,
    draw_document_lengths,
    draw_expert_loads,
    draw_loss_by_position,
    draw_reach,
    draw_retrieval_map,
    to_png,
)

MASKS = {
    "causal": AttentionMask(),
    "window": AttentionMask(window=(9, -1)),
    "documents": AttentionMask(document_lengths=((7, 30, 1, 26),)),
    "documents and window": AttentionMask(window=(5, -1), document_lengths=((20, 44),)),
    "bidirectional": AttentionMask(causal=False),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_every_allowed_pair_belongs_to_the_rank_that_holds_its_query(mask: str, layout: str) -> None:
    plan = make_plan(64, mask=MASKS[mask], ranks=4, layout=layout)
    owners = attention_owners(plan)
    pairs = allowed(MASKS[mask], 64)[0].numpy()
    assert ((owners >= 0) == pairs).all()
    for rank in range(4):
        held = make_plan(64, mask=MASKS[mask], ranks=4, rank=rank, layout=layout).positions.numpy()
        assert (owners[held][pairs[held]] == rank).all()
        assert plan.pairs_by_rank[rank] == pairs[held].sum()


def test_figures_are_arrays_of_colors() -> None:
    plan = make_plan(64, ranks=2, layout="zigzag")
    accuracy = np.array([[1.0, 0.5, np.nan], [0.0, 1.0, 0.25]])
    for image in (
        draw_loss_by_position({"4K": ([0, 16, 32], [3.0, 2.5, float("nan")]), "8K": ([0, 16], [2.0, 1.5])}),
        draw_retrieval_map(accuracy, [512, 1024, 3000], [0.0, 1.0], trained_length=1024, title="passkey"),
        draw_reach([("512", 512), ("1K", 1024)], [512, 1024, 3000], accuracy),
        draw_document_lengths(np.array([0, 1, 5, 4096, 100_000]), "books"),
        draw_document_lengths(np.array([], dtype=np.int64), "nothing"),
        draw_attention_owners(plan, "zigzag"),
        draw_expert_loads(np.array([[np.nan] * 3, [0.0, 0.01, 2.99], [1.0, 1.0, 1.0]])),
    ):
        assert image.dtype == np.uint8
        assert image.ndim == 3
        assert image.shape[2] == 3
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > 4


def test_only_an_expert_without_tokens_is_black() -> None:
    loads = np.array([[4.0, 1.0, 1.0, 1e-3, 3.999], [1.0, 1.0, 1.0, 1.0, 1.0], [np.nan] * 5])
    black = [(draw_expert_loads(x) == 0).all(2).sum() for x in (loads, np.where(loads < 0.01, 0.0, loads))]
    assert black[1] > black[0] + 500  # of text and axes


def filling(draw: Callable[[float], np.ndarray], value: float) -> float:
    """Lightness of the middle of a figure, which cells of one value fill."""
    pixels = draw(value).mean(2)
    height, width = pixels.shape
    return float(np.median(pixels[height // 3 : height // 2, width // 3 : width // 2]))


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda value: draw_reach([("64", 64)] * 4, [32, 64], np.full((4, 2), value)), id="keys by stage"),
        pytest.param(lambda value: draw_retrieval_map(np.full((4, 2), value), [1, 2], [0.0] * 4), id="keys by depth"),
        pytest.param(lambda value: draw_expert_loads(np.full((4, 2), 4 * 0.06**value)), id="lighter loads"),
    ],
)
def test_maps_can_be_read_without_colors(draw: Callable[[float], np.ndarray]) -> None:
    lightness = [filling(draw, value) for value in (0.0, 0.3, 0.6, 1.0)]
    assert np.all(np.diff(lightness) < -10)


def test_ranks_differ_in_lightness() -> None:
    plan = make_plan(64, ranks=4, layout="contiguous")
    pixels = draw_attention_owners(plan).mean(2)
    rows = np.linspace(0, len(pixels) - 1, 200, dtype=int)
    found = [
        value for value, count in zip(*np.unique(pixels[rows].round(), return_counts=True), strict=True) if count > 500
    ]
    assert len(found) >= 5, "four ranks and the ground"
    assert np.all(np.diff(sorted(found)) > 15)


def test_figures_are_about_as_wide_as_tensorboard_shows_them() -> None:
    """Its cards are 350 pixels wide: text of 10 points has 10 of these at least."""
    curves = {"4K": ([0, 16], [3.0, 2.5])}
    ten_lengths = draw_retrieval_map(np.ones((5, 9)), [2**n for n in range(9)], [0.0] * 5, title="a title")
    for image in (draw_loss_by_position(curves, title="a title"), ten_lengths):
        assert image.shape[1] / DPI * 72 <= 350


def test_an_image_as_png_is_the_same_pixels() -> None:
    pixels = draw_reach([("64", 64)], [32, 64], np.array([[1.0, 0.5]]))
    read = importlib.import_module("matplotlib.image").imread(io.BytesIO(to_png(pixels)), format="png")
    np.testing.assert_array_equal(np.round(read[..., :3] * 255).astype(np.uint8), pixels)


def test_a_name_with_dollar_signs_is_no_formula() -> None:
    draw_loss_by_position({"$\\x$": ([0, 16], [3.0, 2.0])})
