"""The result of an evaluation, for scripts, plots and the console."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from torchtitan_cp.config.json_types import JsonObject
from torchtitan_cp.config.names import format_tokens

MAX_LENGTHS = 6  # lines of a chart that can be told apart
NEAR_END_PARTS = 16  # of the sequence


class Retrieval(NamedTuple):
    """Accuracy of one variant of prompts.

    Attributes:
        accuracy: `[depths, lengths]`, fraction of the prompts whose whole answer was right; NaN where none was tried.
        lengths: tokens of a prompt, rising.
        depths: where the needle was, from 0 at the top to 1 just above the question.
    """

    accuracy: np.ndarray
    lengths: tuple[int, ...]
    depths: tuple[float, ...]

    @classmethod
    def of_lists(
        cls, accuracy: Sequence[Sequence[float | None]], lengths: Sequence[int], depths: Sequence[float]
    ) -> "Retrieval":
        """What JSON holds of it, with null where nothing was tried."""
        return cls(np.array(accuracy, dtype=np.float64), tuple(lengths), tuple(depths))

    def at(self, seq_len: int) -> float | None:
        """Mean over depths at the longest length up to `seq_len`; None if that was not tried."""
        lengths = [length for length in self.lengths if length <= seq_len]
        return self.by_length().get(lengths[-1]) if lengths else None

    def lengths_up_to(self, bounds: Collection[int]) -> set[int]:
        """The longest length up to each bound, and the longest of all."""
        return {max(self.lengths), *(max((x for x in self.lengths if x <= bound), default=0) for bound in bounds)}

    def by_length(self) -> dict[int, float]:
        """Mean over depths, of each length that was tried."""
        columns = zip(self.lengths, self.accuracy.T, strict=True)
        return {length: float(np.nanmean(column)) for length, column in columns if not np.isnan(column).all()}


class Baseline(NamedTuple):
    """What was measured at step 0, for later evaluations to be compared with.

    Attributes:
        loss, by_source: as of EvaluationResult, or None where JSON has no number.
        passkey: accuracy with one key, if it was asked for.
    """

    loss: float | None
    by_source: Mapping[str, float | None]
    passkey: Retrieval | None


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation. Losses are in nats a token; what was not measured is None or empty.

    Attributes:
        loss: mean on held-out text at the stage's length, on the same mixture in every stage of a run; unigram: a
            unigram model's loss on the same tokens.
        by_source: mean loss of each source.
        position_starts: first position of each bin; position_losses: mean loss of its tokens, NaN if it has none.
        turn_losses: mean loss of the learned tokens of a conversation's first, second, third and fourth turn and of
            all later ones, NaN if there are none; empty without conversations.
        context_gain: how much lower the loss is with all of the context than with its last few thousand tokens.
        short_loss_rise: rise of the loss at the first stage's length since that stage's end, as a fraction.
        retrieval: by variant of prompts.
        passkey_accuracy: accuracy with one key, at the stage's length.
        held_out_epochs: how often each source's held-out text was read for `loss`.
        left_out: what there was no time or no room for.
        stage_loss: mean on the stage's own mixture; positions, turns and context gain are of that mixture too.
    """

    loss: float
    unigram: float
    by_source: dict[str, float]
    position_starts: list[int]
    position_losses: list[float]
    turn_losses: list[float] = field(default_factory=list)
    context_gain: float | None = None
    short_loss_rise: float | None = None
    retrieval: dict[str, Retrieval] = field(default_factory=dict)
    passkey_accuracy: float | None = None
    held_out_epochs: dict[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    stage_loss: float | None = None

    def to_json(self) -> JsonObject:
        """The result as plain JSON; NaN becomes null."""
        retrieval = {name: each._asdict() for name, each in self.retrieval.items()}
        text = json.dumps({**vars(self), "retrieval": retrieval}, default=np.ndarray.tolist)
        return dict(json.loads(text, parse_constant=lambda nan: None))

    def scalars(self, seq_len: int, stage_lengths: Collection[int] = ()) -> dict[str, float]:
        """The numbers to plot, by name.

        Args:
            seq_len: of the stage; `*_accuracy` are those of the longest prompts up to it.
            stage_lengths: of all stages. With more than MAX_LENGTHS lengths of prompts, accuracy by length is that of
                the longest prompts up to each of these, and of the longest of all.
        """
        sources = self.by_source if len(self.by_source) > 1 else {}
        values = {
            "loss": self.loss,
            "stage_loss": self.stage_loss if sources else None,
            "unigram_loss": self.unigram,
            "context_gain": self.context_gain,
            "short_loss_rise": self.short_loss_rise,
            **{f"loss_by_source/{name}": loss for name, loss in sources.items()},
            **{f"loss_by_turn/{turn.replace(' ', '_')}": loss for turn, loss in self._by_turn.items()},
            **{f"loss_at_end/{end}": loss for end, loss in self.end_losses(seq_len).items()},
            **{f"{name}_accuracy": each.at(seq_len) for name, each in self.retrieval.items()},
        }
        for name, each in self.retrieval.items():
            shown = each.lengths if len(each.lengths) <= MAX_LENGTHS else each.lengths_up_to(stage_lengths)
            for length, mean in each.by_length().items():
                if length in shown:
                    values[f"{name}_by_length/{format_tokens(length)}"] = mean
        return {name: value for name, value in values.items() if value is not None and not math.isnan(value)}

    def end_losses(self, seq_len: int) -> dict[str, float]:
        """Mean losses at the near end of the context, a sixteenth into the sequence, and at the far end, its last bin.

        Near is the bin that holds position S/16: the very first tokens have no context to speak of.
        """
        bins = list(zip(self.position_starts, self.position_losses, strict=True))
        near = [loss for start, loss in bins if start <= seq_len // NEAR_END_PARTS]
        far = [loss for start, loss in bins if start < seq_len]
        return {"near": near[-1], "far": far[-1]} if len(far) > len(near) else {}

    @property
    def _by_turn(self) -> dict[str, float]:
        names = zip(("1", "2", "3", "4", "5 and later"), self.turn_losses, strict=False)
        return {name: loss for name, loss in names if not math.isnan(loss)}

    def since(self, start: Baseline, seq_len: int) -> dict[str, float]:
        """What changed since step 0, by name, of what was measured both times.

        Args:
            seq_len: of the stage.
        """
        changes = {"loss": _change(self.loss, start.loss)}
        for name, loss in self.by_source.items() if len(self.by_source) > 1 else ():
            changes[f"loss_by_source/{name}"] = _change(loss, start.by_source.get(name))
        if "passkey" in self.retrieval and start.passkey:
            changes["passkey_accuracy"] = _change(self.retrieval["passkey"].at(seq_len), start.passkey.at(seq_len))
        return {name: change for name, change in changes.items() if change is not None}

    def lines(self, step: int, seq_len: int, start: Baseline | None = None, *, brief: bool = False) -> Iterator[str]:
        """Lines for a person.

        Args:
            start: what was found at step 0, where that is to be compared with.
            brief: only the loss and what was retrieved, as within a stage.
        """
        yield (
            f"validation at step {step}: loss {self.loss:.4f} on held-out text at length {seq_len:,} "
            f"(a unigram model: {self.unigram:.4f})"
            + (
                f"; {self.stage_loss:.4f} on the stage's own mixture"
                if self.stage_loss not in (None, self.loss)
                else ""
            )
        )
        if brief:
            yield from self._retrieval_lines()
            return
        if len(self.by_source) > 1:
            measured = {name: loss for name, loss in self.by_source.items() if not math.isnan(loss)}
            yield "by source: " + ", ".join(f"{name} {loss:.4f}" for name, loss in measured.items())
        bins = zip(self.position_starts, self.position_losses, strict=True)
        yield "by position: " + ", ".join(f"{start:,}+ {loss:.3f}" for start, loss in bins if not math.isnan(loss))
        if self._by_turn:
            yield "by turn: " + ", ".join(f"{turn} {loss:.4f}" for turn, loss in self._by_turn.items())
        if self.context_gain is not None:
            yield f"context gain {self.context_gain:.4f} nats a token"
        if self.short_loss_rise is not None:
            yield f"the loss at the first stage's length changed by {self.short_loss_rise:+.2%} since that stage's end"
        yield from self._retrieval_lines()
        if start and (changes := self.since(start, seq_len)):
            said = [f"{name.replace('loss_by_source/', '')} {change:+.4f}" for name, change in changes.items()]
            if "passkey_accuracy" in changes:
                said[-1] = f"passkey right {100 * changes['passkey_accuracy']:+.0f} points"
            yield "since step 0: " + ", ".join(said)
        if repeated := [f"{name} {epochs:.1f} times" for name, epochs in self.held_out_epochs.items() if epochs > 1]:
            yield f"held-out text read more than once: {', '.join(repeated)} (evaluation.tokens)"
        yield from (f"not measured: {reason}" for reason in self.left_out)

    def _retrieval_lines(self) -> Iterator[str]:
        for name, retrieval in self.retrieval.items():
            if means := retrieval.by_length():
                accuracy = ", ".join(f"{mean:.0%} at {length:,}" for length, mean in means.items())
                yield f"{name.replace('_', ' ')} right: {accuracy}"


def _change(now: float | None, before: float | None) -> float | None:
    """The difference of two numbers; None if either is none."""
    if now is None or before is None or math.isnan(now) or math.isnan(before):
        return None
    return now - before
