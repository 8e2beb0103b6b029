"""The names that a config offers are those that attention implements, and none is listed twice."""

import pytest

from torchtitan_cp.attention.codec import CODECS
from torchtitan_cp.attention.kernels import KERNELS
from torchtitan_cp.attention.layout import LAYOUTS
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.config import sections


@pytest.mark.parametrize(
    ("offered", "registry"),
    [
        (sections.STRATEGIES, ["auto", *STRATEGIES]),
        (sections.KERNELS, ["auto", *KERNELS]),
        (sections.LAYOUTS, ["auto", *LAYOUTS]),
        (sections.TRANSFERS, [*CODECS]),
    ],
    ids=["strategies", "kernels", "layouts", "transfers"],
)
def test_a_config_offers_what_attention_implements(offered: tuple[str, ...], registry: list[str]) -> None:
    assert sorted(offered) == sorted(registry)
