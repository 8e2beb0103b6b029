"""Rotary frequencies: every kind against transformers, what the papers say of them, and what is refused."""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.ropes import LONGROPE, YARN, config_of, draw
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.names import ROPE_KINDS
from torchtitan_cp.config.rope import KEYS_BY_KIND, Rope
from torchtitan_cp.curriculum import check_head_dim, describe_rope, resolve_stages, rope_frequencies
from torchtitan_cp.curriculum.rope import SCALINGS, powers

# transformers rounds exponents to fp32: half an ulp, 2^-25, times ln(theta) < 18.5 is 5.5e-7, and a few ulp more. It
# blends with a weight that is off by two roundings of 1 - ramp (yarn), or by the error of the turns, 7e-7, times
# high / (high - low) <= 2 (llama3): in parts of the unscaled frequency.
FP32, BLENDED = 1e-6, {"yarn": 2**-23, "llama3": 1.4e-6}


def theirs(rope: Rope, head_dim: int, seq_len: int) -> tuple[list[float], float]:
    """Frequencies and attention factor by transformers, which takes our keys under its names; 0 is not given."""
    kind, positions = rope.kind, 2**16
    parameters: dict[str, Any] = {"rope_theta": rope.theta}
    parameters |= {
        name: getattr(rope, name) for name in KEYS_BY_KIND[kind] if getattr(rope, name) or name == "truncate"
    }
    if kind == "ntk":  # the published formula is "dynamic" with factor 1 at this length
        kind, parameters["factor"], seq_len = "dynamic", 1.0, round(rope.factor * positions)
    if kind == "longrope":
        parameters |= {
            "long_factor": list(rope.long_factor),
            "short_factor": list(rope.short_factor or rope.long_factor),
        }
    parameters |= {"rope_type": kind, "original_max_position_embeddings": parameters.pop("original_seq_len", None)}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters={name: value for name, value in parameters.items() if value is not None},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=seq_len)
    return frequencies.tolist(), factor


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", [kind for kind in ROPE_KINDS if kind != "none"])
def test_frequencies_and_attention_factor_equal_those_of_transformers(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = draw(kind, random.Random(seed))
    ours, our_factor = rope_frequencies(*drawn)
    frequencies, factor = theirs(*drawn)
    assert our_factor == pytest.approx(factor, rel=1e-12)
    for mine, frequency, base in zip(ours, frequencies, powers(drawn[0].theta, drawn[1]), strict=True):
        assert mine == pytest.approx(frequency, rel=FP32, abs=BLENDED.get(kind, 0) * base)

    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    assert ours == pytest.approx(theirs(*drawn)[0], rel=1e-12, abs=0), "their code in fp64"


def test_draws_reach_every_key_and_both_lists() -> None:
    drawn = [draw(kind, random.Random(seed)) for kind in ROPE_KINDS if kind != "none" for seed in range(12)]
    for entry in dataclasses.fields(Rope):
        assert any(getattr(rope, entry.name) != entry.default for rope, _, _ in drawn), entry.name
    chosen = {
        (bool(rope.short_factor), seq_len > rope.original_seq_len) for rope, _, seq_len in drawn if rope.long_factor
    }
    assert chosen == {(False, False), (False, True), (True, False), (True, True)}


def test_every_kind_has_its_keys_and_its_formula() -> None:
    assert set(ROPE_KINDS) == set(KEYS_BY_KIND) == set(SCALINGS)


def test_unscaled_frequencies_are_powers_of_theta() -> None:
    frequencies, factor = rope_frequencies(Rope(theta=10000.0), 8, 1024)
    assert frequencies == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert factor == 1.0


def test_linear_scaling_divides_every_frequency() -> None:
    frequencies, _ = rope_frequencies(Rope(theta=10000.0, kind="linear", factor=4.0), 8, 1024)
    assert frequencies == pytest.approx([0.25, 0.025, 0.0025, 0.00025])


def test_ntk_scaling_divides_the_slowest_frequency_by_the_factor_and_leaves_the_fastest() -> None:
    frequencies, factor = rope_frequencies(Rope(theta=10000.0, kind="ntk", factor=4.0), 8, 1024)
    assert frequencies == pytest.approx([1.0, 0.1 / 4 ** (1 / 3), 0.01 / 4 ** (2 / 3), 0.001 / 4])
    assert factor == 1.0


def test_llama3_scaling_leaves_fast_turns_divides_slow_ones_and_blends_between() -> None:
    rope = Rope(theta=500000.0, kind="llama3", factor=8.0, original_seq_len=8192)
    scaled, _ = rope_frequencies(rope, 128, 131072)
    base, _ = rope_frequencies(Rope(theta=500000.0), 128, 131072)
    for frequency, original in zip(scaled, base, strict=True):
        wavelength = 2 * math.pi / original
        if wavelength < 8192 / 4:
            assert frequency == original
        elif wavelength > 8192 / 1:
            assert frequency == pytest.approx(original / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert frequency == pytest.approx((1 - smooth) * original / 8 + smooth * original)
    assert any(base[i] / 8 < scaled[i] < base[i] for i in range(64))


def test_yarn_leaves_fast_turns_divides_slow_ones_and_sharpens_attention() -> None:
    scaled, factor = rope_frequencies(YARN, 128, 65536)
    base, _ = rope_frequencies(Rope(), 128, 65536)
    turns = [4096 * frequency / (2 * math.pi) for frequency in base]
    left = [i for i in range(64) if scaled[i] == base[i]]
    divided = [i for i in range(64) if scaled[i] == base[i] / 16]
    assert left == list(range(len(left)))
    assert divided == list(range(divided[0], 64))
    assert turns[left[-1]] > 32 > turns[left[-1] + 1]
    assert turns[divided[0] - 1] > 1 > turns[divided[0]]
    assert factor == pytest.approx(0.1 * math.log(16) + 1)


def test_longrope_takes_the_short_list_up_to_the_original_length_and_the_long_one_beyond() -> None:
    rope = dataclasses.replace(LONGROPE, short_factor=(1.0, 1.0, 1.0, 2.0))
    base, _ = rope_frequencies(Rope(), 8, 4096)
    short, factor = rope_frequencies(rope, 8, 4096)
    long, same_factor = rope_frequencies(rope, 8, 4097)
    assert [b / s for b, s in zip(base, short, strict=True)] == pytest.approx([1, 1, 1, 2])
    assert [b / s for b, s in zip(base, long, strict=True)] == pytest.approx([2, 3, 4, 5])
    assert factor == same_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(4096)))
    assert rope_frequencies(LONGROPE, 8, 4096)[0] == long


def test_the_log_tells_the_base_and_the_scaling() -> None:
    assert describe_rope(Rope(theta=500000.0)) == "theta 500000"
    assert describe_rope(YARN) == "theta 10000 yarn x 16"


@pytest.mark.parametrize(
    ("rope", "head_dim", "wanted"),
    [
        (
            LONGROPE,
            16,
            "rope.long_factor has 4 numbers, and head_dim = 16 has 8 pairs\n  fix: give 8 numbers, one for each pair",
        ),
        (
            dataclasses.replace(LONGROPE, short_factor=(1.0,)),
            8,
            "rope.short_factor has 1 numbers, and head_dim = 8 has 4 pairs\n  fix: give 4 numbers, one for each pair",
        ),
        (Rope(kind="ntk", factor=2.0), 2, "rope.kind = 'ntk' needs more than the one pair of head_dim = 2"),
    ],
)
def test_a_scaling_that_the_heads_cannot_take_is_refused(rope: Rope, head_dim: int, wanted: str) -> None:
    stages = resolve_stages(config_of(rope), 1)
    with pytest.raises(ConfigError) as caught:
        check_head_dim(stages, head_dim)
    assert f"curriculum.stages[1].{wanted}" in str(caught.value)


def test_lists_of_one_number_a_pair_are_taken() -> None:
    check_head_dim(resolve_stages(config_of(LONGROPE), 1), 8)
