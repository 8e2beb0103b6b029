"""The names that a config offers are those that attention implements, and none is listed twice."""

import pytest

from torchtitan_cp.attention.codec import CODECS
from torchtitan_cp.attention.kernels import KERNELS
from torchtitan_cp.attention.layouts import LAYOUTS
from torchtitan_cp.attention.strategies import STRATEGIES
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
