"""The names that a config offers are those that attention implements, and none is listed twice."""

import pytest

from torchtitan_cp.attention.codec import CODECS
from torchtitan_cp.attention.kernels import KERNELS
from torchtitan_cp.attention.layouts import LAYOUTS
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.strategies import STRATEGIES, choose_strategy
from torchtitan_cp.config import names


@pytest.mark.parametrize(
    ("offered", "registry"),
    [
        (names.STRATEGIES, ["auto", *STRATEGIES]),
        (names.KERNELS, ["auto", *KERNELS]),
        (names.LAYOUTS, ["auto", *LAYOUTS]),
        (names.TRANSFERS, [*CODECS]),
    ],
    ids=["strategies", "kernels", "layouts", "transfers"],
)
def test_a_config_offers_what_attention_implements(offered: tuple[str, ...], registry: list[str]) -> None:
    assert sorted(offered) == sorted(registry)


def test_auto_trades_heads_where_that_carries_less_than_half_of_the_ring_and_no_window_shortens_it() -> None:
    causal, window = (AttentionMask(window=(left, -1)).band for left in (-1, 9))
    cases = [(8, 8, 8, causal), (16, 8, 8, causal), (8, 8, 8, window), (8, 8, 1, causal)]
    assert [choose_strategy(*case) for case in cases] == ["all_to_all", "ring", "ring", "ring"]
