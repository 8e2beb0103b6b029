"""What pictures are drawn from, and that each can be drawn."""

import numpy as np
import pytest

from tests.support.oracle import allowed
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.metrics.pictures import (
    in_k,
    length_histogram,
    loss_against_position,
    passkey_map,
    tile_map,
    tile_owners,
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
def test_the_tile_map_has_every_allowed_pair_with_the_rank_that_holds_its_query(mask: str, layout: str) -> None:
    plan = make_plan(64, mask=MASKS[mask], ranks=4, layout=layout)
    owners = tile_owners(plan)
    pairs = allowed(MASKS[mask], 64)[0].numpy()
    assert ((owners >= 0) == pairs).all()
    for rank in range(4):
        held = make_plan(64, mask=MASKS[mask], ranks=4, rank=rank, layout=layout).positions.numpy()
        assert (owners[held][pairs[held]] == rank).all()
        assert plan.areas[rank] == pairs[held].sum()


def test_pictures_are_arrays_of_colours() -> None:
    plan = make_plan(64, ranks=2, layout="zigzag")
    accuracy = np.array([[1.0, 0.5, np.nan], [0.0, 1.0, 0.25]])
    for picture in (
        loss_against_position({"4K": ([0, 16, 32], [3.0, 2.5, float("nan")]), "8K": ([0, 16], [2.0, 1.5])}),
        passkey_map(accuracy, [512, 1024, 3000], [0.0, 1.0], trained_length=1024, title="passkey"),
        length_histogram(np.array([0, 1, 5, 4096, 100_000]), "books"),
        length_histogram(np.array([], dtype=np.int64), "nothing"),
        tile_map(plan, "zigzag"),
    ):
        assert picture.dtype == np.uint8
        assert picture.ndim == 3
        assert picture.shape[2] == 3
        assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 4


def test_lengths_are_said_in_k() -> None:
    assert [in_k(length) for length in (100, 512, 1024, 3000, 65536, 1 << 20)] == [
        "100",
        "512",
        "1K",
        "3000",
        "64K",
        "1M",
    ]
