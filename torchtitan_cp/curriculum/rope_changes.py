"""What a stage changes in the rotary embedding of the stage before it, and a longer stage that changes nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

from torchtitan_cp.config.rope import KEYS_BY_KIND, Rope
from torchtitan_cp.config.stages import ResolvedStage


class RopeNote(NamedTuple):
    """A sentence about a stage's rotary embedding.

    Attributes:
        stage: its index, from 0.
        text: for the log.
        warns: whether the stage may not be what its author means.
    """

    stage: int
    text: str
    warns: bool


def rope_notes(
    stages: Sequence[ResolvedStage], own: Rope | None, trained_tokens: int = 0, span_tokens: int = 0
) -> Iterator[RopeNote]:
    """Compare each stage with the one before it, and the first with the weights that training starts from.

    Args:
        own: the model's own rotary embedding, of a stage without `rope`; None: one that no stage can have.
        trained_tokens: longest sequence of the weights that training starts from; 0: they are fresh.
        span_tokens: tokens that the widest attention of the model spans; 0: all.
    """
    before, reach = own, _reach(own, trained_tokens)
    for stage in stages:
        rope, number = stage.rope or own, stage.index + 1
        changes = list(_changes(before, rope)) or list(_changed_list(rope, trained_tokens, stage.seq_len))
        if changes and stage.index:
            fallback = bool(before and rope and before.theta != rope.theta and "theta" in rope.omitted)
            reason = "; its rope has no theta, so it takes the model's own" * fallback
            text = f"stage {number} changes the RoPE of stage {number - 1}: {', '.join(changes)}{reason}"
            yield RopeNote(stage.index, text, fallback)
        if changes:
            reach = _reach(rope, trained_tokens)
        elif rope and 0 < trained_tokens < min(stage.seq_len, span_tokens or stage.seq_len):
            text = f"stage {number} has {stage.seq_len} tokens, trained to {trained_tokens}, with unchanged RoPE"
            yield RopeNote(stage.index, text, reach < stage.seq_len)
        before, trained_tokens = rope, max(trained_tokens, stage.seq_len)


def _reach(rope: Rope | None, trained_tokens: int) -> float:
    """The length, in tokens, that a scaling is made for, where the model was trained to `trained_tokens` before it."""
    if rope is None or rope.kind == "none":
        return trained_tokens
    return max(trained_tokens, rope.factor * (rope.original_seq_len or trained_tokens))


def _changes(before: Rope | None, after: Rope | None) -> Iterator[str]:
    """The keys that differ, as `key old -> new`; a key that neither kind reads is at its default in both."""
    if before == after:
        return
    if before is None or after is None:
        yield "the model's own -> another" if after else "another -> the model's own"
        return
    read = {"theta", "kind", *KEYS_BY_KIND[before.kind], *KEYS_BY_KIND[after.kind]}
    for name in (entry.name for entry in fields(Rope) if entry.name in read):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield f"{name} {_short(old)} -> {_short(new)}"


def _changed_list(rope: Rope | None, trained_tokens: int, seq_len: int) -> Iterator[str]:
    """A longrope that takes its long list for the first time."""
    if rope and rope.short_factor and 0 < trained_tokens <= rope.original_seq_len < seq_len:
        yield "short_factor -> long_factor"


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} numbers" if value else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
