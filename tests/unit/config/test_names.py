"""Names that a config offers: those that are implemented, none listed twice; lengths as they are written."""

import pytest

from torchtitan_cp.attention.codec import CODECS
from torchtitan_cp.attention.kernels import KERNELS
from torchtitan_cp.attention.layouts import LAYOUTS
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.config import names
from torchtitan_cp.config.names import format_bytes, format_duration, format_tokens


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


def test_sizes_are_written_in_the_unit_that_suits_them() -> None:
    assert [format_bytes(size) for size in (0, 5000, 4_215_807, 1 << 30, 16_060_522_496, 1 << 50)] == [
        "0 KiB",
        "5 KiB",
        "4.0 MiB",
        "1.00 GiB",
        "14.96 GiB",
        "1,048,576.00 GiB",
    ]


def test_lengths_are_written_in_powers_of_two() -> None:
    assert [format_tokens(length) for length in (100, 512, 1024, 3000, 65536, 1 << 20)] == [
        "100",
        "512",
        "1K",
        "3000",
        "64K",
        "1M",
    ]


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(0.0751, "0.0751 s"), (59, "59 s"), (90, "1.5 min"), (7200, "2 h"), (864000, "10 days")]
)
def test_a_duration_has_a_unit_that_suits_it(seconds: float, wanted: str) -> None:
    assert format_duration(seconds) == wanted
