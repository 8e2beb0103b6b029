"""Checks between the keys of a stage's rotary embedding."""

import dataclasses
from typing import Any

from torchtitan_cp.config.errors import ConfigError
from torchtitan_cp.config.names import ROPE_KINDS
from torchtitan_cp.config.sections import Rope

TAKES = {
    kind: tuple(entry.name for entry in dataclasses.fields(Rope) if kind in entry.metadata["read_by"])
    for kind in ROPE_KINDS
}
"""The keys each kind reads, in addition to theta."""


def check_read_keys(section: Any, selector: str, where: str) -> None:
    """Refuse a key that the chosen kind does not read, as it would be dropped silently.

    Args:
        section: whose keys say which kinds read them.
        selector: name of the key that chooses the kind.
        where: the dotted key of `section`.
    """
    kind = getattr(section, selector)
    for entry in dataclasses.fields(section):
        read_by = entry.metadata.get("read_by")
        if read_by and kind not in read_by and getattr(section, entry.name) != entry.default:
            raise ConfigError(
                f"{where}.{entry.name} does nothing with {selector} = {kind!r}",
                fix=f"remove it, or use {selector} = {' or '.join(map(repr, read_by))}",
            )


def check_rope(rope: Rope, seq_len: int, where: str) -> None:
    """Check a scaling, as far as possible without the model's head_dim.

    Args:
        seq_len: S of the stage, in tokens.
        where: the dotted key of `rope`.

    Raises:
        ConfigError: a key that the kind does not read, one it lacks, or keys that exclude each other.
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
    takes = TAKES[rope.kind]
    if "original_seq_len" in takes:
        _check_original(rope, seq_len, where)
    scales = rope.factor > 1 or (rope.kind == "longrope" and rope.attention_factor)
    if "factor" in takes and not scales:
        ratio = f"{seq_len / rope.original_seq_len:g}" if rope.original_seq_len else "8"
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
            f"{where} has kind = {rope.kind!r} and no original_seq_len",
            fix="add the length that the model was trained on before, e.g. original_seq_len = 8192",
        )
    # Llama 3.1's scaling belongs to its weights, at any length.
    if rope.original_seq_len > seq_len and not rope.short_factor and rope.kind != "llama3":
        way = "give short_factor for such stages" if rope.kind == "longrope" else "use kind = 'none' in this stage"
        raise ConfigError(
            f"{where}.original_seq_len = {rope.original_seq_len} is longer than the stage's seq_len = {seq_len}",
            fix=way,
        )
