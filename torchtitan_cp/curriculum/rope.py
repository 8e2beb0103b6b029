"""Rotary frequencies of a stage: a base, and a scaling.

Everything is computed in fp64. Each kind gives the numbers of the function of that name in Hugging Face
transformers (`modeling_rope_utils.ROPE_INIT_FUNCTIONS`), which a test holds.
"""

import math
from collections.abc import Callable, Sequence

from torchtitan_cp.config.errors import ConfigError
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.stages import ResolvedStage

Frequencies = tuple[float, ...]


def check_head_dim(stages: Sequence[ResolvedStage], head_dim: int) -> None:
    """Refuse scalings that do not fit the model's heads.

    Raises:
        ConfigError: a factor list without one number for each of the D/2 pairs, or ntk on a single pair.
    """
    for stage in stages:
        where, rope = f"{stage.where}.rope", stage.rope
        for name in ("long_factor", "short_factor") if rope else ():
            factors = getattr(rope, name)
            if factors and len(factors) != head_dim // 2:
                raise ConfigError(
                    f"{where}.{name} has {len(factors)} numbers, and head_dim = {head_dim} has {head_dim // 2} pairs",
                    fix=f"give {head_dim // 2} numbers, one for each pair; another model's list does not fit",
                )
        if rope and rope.kind == "ntk" and head_dim == 2:
            raise ConfigError(f"{where}.kind = 'ntk' needs more than the one pair of head_dim = 2", fix="use linear")


def rope_frequencies(rope: Rope, head_dim: int, seq_len: int) -> tuple[Frequencies, float]:
    """Angles per position of the D/2 pairs, in radians, and the factor on cos and sin.

    Args:
        rope: a stage's, that has passed `check_config` and `check_head_dim`.
        head_dim: D.
        seq_len: S of the stage, in tokens; longrope chooses its list by it.

    Source: Su et al., 2021; the scalings as named below.
    """
    return SCALINGS[rope.kind](powers(rope.theta, head_dim), rope, seq_len)


def describe_rope(rope: Rope | None) -> str:
    """Theta and scaling, for the log."""
    if rope is None:
        return "as the model has it"
    return f"theta {rope.theta:g}" + (f" {rope.kind} x {rope.factor:g}" if rope.kind != "none" else "")


def powers(theta: float, head_dim: int) -> Frequencies:
    """theta ** (-2i / D) for pair i."""
    return tuple(theta ** (-2 * i / head_dim) for i in range(head_dim // 2))


def linear(base: Frequencies, rope: Rope, seq_len: int) -> tuple[Frequencies, float]:
    """Positions divided by the factor. Source: position interpolation (Chen et al., 2023)."""
    return tuple(frequency / rope.factor for frequency in base), 1.0


def ntk(base: Frequencies, rope: Rope, seq_len: int) -> tuple[Frequencies, float]:
    """Theta times factor ** (D / (D - 2)): the slowest pair is divided by the factor, the fastest left alone.

    Source: NTK-aware interpolation as published (bloc97, 2023; section 3.1 of the YaRN paper). transformers'
    "dynamic" kind applies the same formula anew at every length L, with a(L) = factor L / M - (factor - 1) for a
    model of M positions; a stage has one length, so `factor` here is that a, and L / M where its factor is 1.
    """
    head_dim = 2 * len(base)
    return powers(rope.theta * rope.factor ** (head_dim / (head_dim - 2)), head_dim), 1.0


def llama3(base: Frequencies, rope: Rope, seq_len: int) -> tuple[Frequencies, float]:
    """Slow dimensions divided by the factor, fast ones left, the ones between blended by their turns.

    Source: `_compute_llama3_parameters` of Hugging Face transformers, after Meta's Llama 3.1.
    """
    scaled = []
    for frequency in base:
        turns = rope.original_seq_len * frequency / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        scaled.append(blend(frequency, rope.factor, kept))
    return tuple(scaled), 1.0


def yarn(base: Frequencies, rope: Rope, seq_len: int) -> tuple[Frequencies, float]:
    """As llama3, but blended by the number of the pair, between the pairs of `beta_fast` and `beta_slow` turns.

    Source: Peng et al., 2023, sections 3.2 and 3.4. The paper blends by turns; its code and transformers by pair, as
    here, between whole pairs with `truncate`.
    """
    head_dim = 2 * len(base)

    def pair_of(turns: float) -> float:
        """Index of the pair, a fraction, that makes this many turns in the original length."""
        return head_dim * math.log(rope.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # transformers' way around an empty blend
    scaled = tuple(blend(frequency, rope.factor, 1 - (i - first) / width) for i, frequency in enumerate(base))
    return scaled, rope.attention_factor or _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: Rope) -> float:
    """The paper's sqrt(1 / t) = 0.1 ln(factor) + 1, or with mscale DeepSeek-V2's ratio of two such terms."""

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1

    return term(rope.mscale) / term(rope.mscale_all_dim) if rope.mscale else term(1.0)


def longrope(base: Frequencies, rope: Rope, seq_len: int) -> tuple[Frequencies, float]:
    """Each pair divided by a number of its own: the list for stages beyond `original_seq_len`, or that up to it.

    Source: LongRoPE (Ding et al., 2024); the attention factor as in the released code of Phi-3.
    """
    short = rope.short_factor and seq_len <= rope.original_seq_len
    divisors = rope.short_factor if short else rope.long_factor
    published = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_seq_len))
    scaled = tuple(frequency / divisor for frequency, divisor in zip(base, divisors, strict=True))
    return scaled, rope.attention_factor or published


def blend(frequency: float, factor: float, kept: float) -> float:
    """Between the frequency (`kept` 1 and above) and the frequency divided by the factor (0 and below)."""
    kept = min(1.0, max(0.0, kept))
    return (1 - kept) * frequency / factor + kept * frequency


SCALINGS: dict[str, Callable[[Frequencies, Rope, int], tuple[Frequencies, float]]] = {
    "none": linear,  # by a factor of 1
    "linear": linear,
    "ntk": ntk,
    "yarn": yarn,
    "longrope": longrope,
    "llama3": llama3,
}
