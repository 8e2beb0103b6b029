"""Rotary frequencies of a stage: a base, and a scaling of what it gives."""

import math
from collections.abc import Callable

from torchtitan_cp.config.sections import Rope

Frequencies = tuple[float, ...]


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[Frequencies, float]:
    """Angles per position of the D/2 pairs, in radians, and the factor on cos and sin.

    Source: Su et al., 2021; the scalings as named below.
    """
    base = tuple(rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2))
    return SCALINGS[rope.kind](base, rope)


def unscaled(base: Frequencies, rope: Rope) -> tuple[Frequencies, float]:
    """As theta gives them."""
    return base, 1.0


def linear(base: Frequencies, rope: Rope) -> tuple[Frequencies, float]:
    """Positions divided by the factor. Source: position interpolation (Chen et al., 2023)."""
    return tuple(frequency / rope.factor for frequency in base), 1.0


def llama3(base: Frequencies, rope: Rope) -> tuple[Frequencies, float]:
    """Slow dimensions divided by the factor, fast ones left, the ones between blended.

    Source: `_compute_llama3_parameters` of Hugging Face transformers, after Meta's Llama 3.1.
    """
    scaled = []
    for frequency in base:
        turns = rope.original_seq_len * frequency / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = min(1.0, max(0.0, blend))
        scaled.append((1 - blend) * frequency / rope.factor + blend * frequency)
    return tuple(scaled), 1.0


SCALINGS: dict[str, Callable[[Frequencies, Rope], tuple[Frequencies, float]]] = {
    "none": unscaled,
    "linear": linear,
    "llama3": llama3,
}
