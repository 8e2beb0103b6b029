"""A stage's rotary embedding, and the checks between its keys."""

from dataclasses import dataclass, fields
from typing import ClassVar

from torchtitan_cp.config.errors import ConfigError
from torchtitan_cp.config.key import check_read_keys, key
from torchtitan_cp.config.names import ROPE_KINDS


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a stage.

    Attributes:
        theta: base of the frequencies; default: that of config.json, if the model has one, not the previous stage's
        kind: scaling of the frequencies
        factor: every kind but none: how much longer the context becomes
        original_seq_len: llama3, yarn, longrope: context length before scaling, in tokens; default: that of
            config.json, if the model has one: its max_position_embeddings where it has no scaling
        low_freq_factor: llama3: dimensions with fewer turns are scaled by the whole factor
        high_freq_factor: llama3: dimensions with more turns are not scaled
        attention_factor: yarn, longrope: factor on cos and sin; 0: the paper's, from factor
        beta_fast: yarn: dimensions with more turns are not scaled
        beta_slow: yarn: dimensions with fewer turns are scaled by the whole factor
        mscale: yarn: numerator of DeepSeek's attention factor; 0: the paper's
        mscale_all_dim: yarn: its denominator; given with mscale
        truncate: yarn: the blend starts and ends at whole dimensions
        long_factor: longrope: divisors of the head_dim / 2 frequencies; 1 leaves one unchanged
        short_factor: longrope: divisors in stages up to original_seq_len; default: long_factor

    `omitted` are the keys that the TOML file leaves out. If the model has a config.json, they come from there.
    """

    omitted: ClassVar[tuple[str, ...]] = ()
    theta: float = key(10000.0, least=1)
    kind: str = key("none", choices=ROPE_KINDS)
    factor: float = key(1.0, least=1, read_by=ROPE_KINDS[1:])
    original_seq_len: int = key(0, least=0, read_by=("yarn", "longrope", "llama3"))
    low_freq_factor: float = key(1.0, least=0, read_by=("llama3",))
    high_freq_factor: float = key(4.0, least=0, read_by=("llama3",))
    attention_factor: float = key(0.0, least=0, read_by=("yarn", "longrope"))
    beta_fast: float = key(32.0, least=0, read_by=("yarn",))
    beta_slow: float = key(1.0, least=0, read_by=("yarn",))
    mscale: float = key(0.0, least=0, read_by=("yarn",))
    mscale_all_dim: float = key(0.0, least=0, read_by=("yarn",))
    truncate: bool = key(True, read_by=("yarn",))
    long_factor: tuple[float, ...] = key((), read_by=("longrope",))
    short_factor: tuple[float, ...] = key((), read_by=("longrope",))


KEYS_BY_KIND = {
    kind: tuple(entry.name for entry in fields(Rope) if kind in entry.metadata["read_by"]) for kind in ROPE_KINDS
}
"""The keys each kind reads, in addition to theta."""


def check_rope(rope: Rope, seq_len: int, where: str) -> None:
    """Check a scaling, as far as possible without the model's head_dim.

    Args:
        seq_len: S of the stage, in tokens.
        where: the dotted key of `rope`.

    Raises:
        ConfigError: a key is set that the kind does not read, one is missing, or two exclude each other.
    """
    check_read_keys(rope, "kind", where)
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ConfigError(f"{where}: high_freq_factor must be above low_freq_factor", fix="use e.g. 1 and 4")
    if rope.kind == "yarn":
        _check_yarn(rope, where)
    if not all(number > 0 for number in (*rope.long_factor, *rope.short_factor)):
        raise ConfigError(
            f"{where}: long_factor and short_factor divide, so each number must be above 0",
            fix="use 1 to leave a frequency alone",
        )
    takes = KEYS_BY_KIND[rope.kind]
    if "original_seq_len" in takes:
        _check_original(rope, seq_len, where)
    scales = rope.factor > 1 or (rope.kind == "longrope" and rope.attention_factor)
    if "factor" in takes and not scales:
        longer = rope.original_seq_len and seq_len > rope.original_seq_len
        ratio = f"{seq_len / rope.original_seq_len:g}" if longer else "8"
        raise ConfigError(f"{where} has kind = {rope.kind!r} and no factor", fix=f"add factor = {ratio} or another")
    if "long_factor" in takes and not rope.long_factor:
        raise ConfigError(f"{where} has kind = 'longrope' and no long_factor", fix="give head_dim / 2 numbers")


def _check_yarn(rope: Rope, where: str) -> None:
    if rope.theta == 1:
        raise ConfigError(
            f"{where}.theta = 1 turns all pairs at the same speed, and yarn needs different ones", fix="use e.g. 10000"
        )
    if not 0 < rope.beta_slow < rope.beta_fast:
        raise ConfigError(f"{where}: beta_fast must be above beta_slow, and that above 0", fix="use e.g. 32 and 1")
    if bool(rope.mscale) != bool(rope.mscale_all_dim):
        raise ConfigError(f"{where} has one of mscale and mscale_all_dim", fix="give both, or neither for the paper's")
    if rope.mscale and rope.attention_factor:
        raise ConfigError(f"{where} has attention_factor, which overrides mscale", fix="give one of them")


def _check_original(rope: Rope, seq_len: int, where: str) -> None:
    if rope.original_seq_len < 2:
        raise ConfigError(
            f"{where} has kind = {rope.kind!r} and original_seq_len = {rope.original_seq_len}",
            fix="set it to the length that the model was trained on before, e.g. original_seq_len = 8192",
        )
    # Llama 3.1's scaling belongs to its weights, at any length.
    if rope.original_seq_len > seq_len and not rope.short_factor and rope.kind != "llama3":
        way = f"give an original_seq_len of at most {seq_len}, or leave the rope out of this stage"
        way = "give short_factor for such stages" if rope.kind == "longrope" else way
        raise ConfigError(
            f"{where}.original_seq_len = {rope.original_seq_len} is longer than the stage's seq_len = {seq_len}",
            fix=way,
        )
