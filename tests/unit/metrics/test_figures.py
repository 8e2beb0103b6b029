"""What figures are drawn from, and that each can be drawn."""

import importlib
import io

import numpy as np
import pytest

from tests.support.oracle import allowed
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.metrics.figures import (
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


def test_the_map_of_keys_can_be_read_without_colors() -> None:
    """The more keys are found, the darker is a cell."""
    lightness = [
        draw_reach([("64", 64)], [32, 64], np.full((1, 2), value)).mean(2)[70:100].mean()
        for value in (0.0, 0.3, 0.6, 1.0)
    ]
    assert np.all(np.diff(lightness) < -10)


def test_an_image_as_png_is_the_same_pixels() -> None:
    pixels = draw_reach([("64", 64)], [32, 64], np.array([[1.0, 0.5]]))
    read = importlib.import_module("matplotlib.image").imread(io.BytesIO(to_png(pixels)), format="png")
    np.testing.assert_array_equal(np.round(read[..., :3] * 255).astype(np.uint8), pixels)


def test_a_name_with_dollar_signs_is_no_formula() -> None:
    draw_loss_by_position({"$\\x$": ([0, 16], [3.0, 2.0])})
