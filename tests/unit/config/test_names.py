"""Names that a config offers: those that are implemented, none listed twice; lengths as they are written."""

import pytest

from torchtitan_cp.attention.codec import CODECS
from torchtitan_cp.attention.kernels import KERNELS
from torchtitan_cp.attention.layouts import LAYOUTS
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.config import names
from torchtitan_cp.config.names import format_tokens


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


def test_lengths_are_written_in_powers_of_two() -> None:
    assert [format_tokens(length) for length in (100, 512, 1024, 3000, 65536, 1 << 20)] == [
        "100",
        "512",
        "1K",
        "3000",
        "64K",
        "1M",
    ]
