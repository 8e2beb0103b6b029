"""What a look at the network found, for scripts and for a person."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtitan_cp.evaluation.retrieval import Retrieval


@dataclass(frozen=True)
class Evaluated:
    """What a look at the network found. Losses are in nats a token; None, or nothing, where it was not measured.

    Attributes:
        loss: mean on held-out text at the stage's length; unigram: a unigram model's, on the same tokens.
        by_source: mean loss of each source.
        position_starts: first position of each bin; position_losses: mean loss of its tokens, NaN without any.
        context_gain: by how much the loss falls with all of the context, against its last few thousand tokens.
        short_loss_rise: of the loss at the first stage's length since that stage's end, as a fraction.
        retrieval: by the kind of prompt.
        passkey_accuracy: of one key, at the stage's length.
        left_out: what there was no time for, or no room.
    """

    loss: float
    unigram: float
    by_source: dict[str, float]
    position_starts: list[int]
    position_losses: list[float]
    context_gain: float | None = None
    short_loss_rise: float | None = None
    retrieval: dict[str, Retrieval] = field(default_factory=dict)
    passkey_accuracy: float | None = None
    left_out: tuple[str, ...] = ()


def numbers_of(found: Evaluated) -> dict[str, Any]:
    """What was found as plain JSON, in which null is NaN: nothing was measured there."""
    plain = dataclasses.asdict(found)
    for each in plain["retrieval"].values():
        each["accuracy"] = each["accuracy"].tolist()
    return _without_nan(plain)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def describe(step: int, seq_len: int, found: Evaluated) -> Iterator[str]:
    """Lines for a person."""
    yield (
        f"validation at step {step}: loss {found.loss:.4f} on held-out text at length {seq_len:,} "
        f"(a unigram model: {found.unigram:.4f})"
    )
    if len(found.by_source) > 1:
        yield "by source: " + ", ".join(f"{name} {loss:.4f}" for name, loss in found.by_source.items())
    bins = zip(found.position_starts, found.position_losses, strict=True)
    yield "by position: " + ", ".join(f"{start:,} on {loss:.3f}" for start, loss in bins if not math.isnan(loss))
    if found.context_gain is not None:
        yield f"context gain {found.context_gain:.4f} nats a token"
    if found.short_loss_rise is not None:
        yield f"the loss at the first stage's length rose by {found.short_loss_rise:.2%} since that stage's end"
    for name, each in found.retrieval.items():
        columns = zip(each.lengths, each.accuracy.T, strict=True)
        tried = [f"{np.nanmean(right):.0%} at {length:,}" for length, right in columns if not np.isnan(right).all()]
        if tried:
            yield f"{name.replace('_', ' ')} right: " + ", ".join(tried)
    if found.left_out:
        yield "not measured: " + "; ".join(found.left_out)
