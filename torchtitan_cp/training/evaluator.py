"""What is measured between steps, on held-out text, and whether a stage's gate opens on it."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.config.sections import Evaluation, ResolvedStageData
from torchtitan_cp.curriculum import StagePlan, judge
from torchtitan_cp.curriculum.gate import Verdict
from torchtitan_cp.data.batches.loader import BatchLayout, MicroBatch, Samples, read_rows
from torchtitan_cp.data.batches.packing import PackedSequence, Span
from torchtitan_cp.evaluation import (
    Budget,
    EvaluationResult,
    Prompt,
    PromptWriter,
    Retrieval,
    Wording,
    evaluating,
    unigram_loss,
)
from torchtitan_cp.metrics.positions import bin_starts, sum_by_bin
from torchtitan_cp.runtime import any_rank
from torchtitan_cp.training.data_pipeline import DataPipeline
from torchtitan_cp.training.model import ParallelModel

logger = logging.getLogger(__name__)

LONG_ENOUGH_TOKENS = 8192  # for any question
AT_ONCE_TOKENS = 16384  # of a forward, which keeps nothing for a backward


@dataclass(frozen=True)
class HeldOutLosses:
    """Sums over held-out text, of all ranks.

    Attributes:
        seq_len: S of the sequences.
        sources: names.
        by_bin: `[sources, 2, bins]` fp64, (sum, tokens) by source and position.
        late: `[2]` fp64, of the tokens that context gain compares.
    """

    seq_len: int
    sources: list[str]
    by_bin: Tensor
    late: Tensor

    @property
    def loss(self) -> float:
        """Mean over all tokens."""
        return mean(self.by_bin.sum((0, 2)))

    @property
    def by_source(self) -> dict[str, float]:
        """Mean over the tokens of each source."""
        return {name: mean(sums) for name, sums in zip(self.sources, self.by_bin.sum(2), strict=True)}

    @property
    def by_position(self) -> list[float]:
        """Mean over the tokens of each bin."""
        return [mean(pair) for pair in self.by_bin.sum(0).T]


def mean(pair: Tensor) -> float:
    """(sum, count) -> their quotient; NaN of nothing."""
    total, count = pair.tolist()
    return total / count if count else math.nan


class Evaluator:
    """Looks at the network between steps, and changes nothing.

    Args:
        network, reading: of the run, in the stage at hand.
        settings: [evaluation].
        first: stage of the curriculum, whose length the model should stay good at.
        busy: told what this rank begins, in words that fit behind "rank 3 is".
        stopping: whether this rank was asked to stop.

    Attributes:
        budget: the time this may take; the trainer tells it what training takes.
    """

    def __init__(
        self,
        model: ParallelModel,
        data_pipeline: DataPipeline,
        settings: Evaluation,
        first: StagePlan,
        busy: Callable[[str], None],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.data_pipeline, self.settings = model, data_pipeline, settings
        self.first, self.busy, self.budget = first, busy, Budget(settings.max_share)
        self.stopping, self.may_end = stopping, False
        tokenizer, passkey = data_pipeline.corpus.tokenizer, settings.passkey
        wording = Wording(passkey.needle, passkey.question)
        self.writer = PromptWriter(
            lambda text: tokenizer.encode_batch([text])[0], data_pipeline.filler, wording, passkey.keys
        )

    def evaluate(
        self, stage: StagePlan, batch_layout: BatchLayout, *, at_end: bool, short_before: float | None
    ) -> EvaluationResult | None:
        """What [evaluation] asks for and there is time for; what the stage's gate asks for in any case. Collective.

        Args:
            batch_layout: who reads what of the stage.
            at_end: of the stage. Between steps an evaluation may be left out whole.
            short_before: loss at the first stage's length at that stage's end, where it was measured.

        Returns:
            None where nothing is held out, or there is no time, or between steps the run is to stop.
        """
        tokens, self.left_out = self.settings.tokens, dict[str, None]()
        if not (at_end or stage.until or self._affords(tokens)):
            logger.info("no evaluation now: more than evaluation.max_share = %g of the time", self.budget.share)
            return None
        try:
            self.may_end = not at_end
            return self._evaluate(stage, batch_layout, tokens, at_end=at_end, short_before=short_before)
        except _Stopped:
            logger.info("the evaluation ends unfinished, as the run is to stop")
            return None
        finally:
            self.may_end = False

    def _evaluate(
        self, stage: StagePlan, batch_layout: BatchLayout, tokens: int, *, at_end: bool, short_before: float | None
    ) -> EvaluationResult | None:
        batch_layout, block = resized(batch_layout, stage.seq_len), self.settings.context_gain_tokens
        data = self.data_pipeline.stage_data(stage)
        held_out = self.held_out(batch_layout, data)
        if held_out is None:
            return None
        gain = rise = None
        asked = "short_loss_rise" in stage.until
        known = stage.index and short_before and (at_end or asked)
        sharing, alike = stage.cp * stage.tp, "the loss at the first stage's length"
        if known and self.first.seq_len % (2 * sharing):
            self.left_out[f"{alike}, which cp x tp = {sharing} ranks cannot share"] = None
        elif known and self._due(alike, tokens, asked):
            short = self.held_out(resized(batch_layout, self.first.seq_len), self.data_pipeline.stage_data(self.first))
            rise = short.loss / short_before - 1 if short and short_before else None
        retrieval = self.retrieve(stage, batch_layout)
        if block and batch_layout.seq_len >= 2 * block and self._due("context gain", tokens):
            cut = self.held_out(batch_layout, data, block)
            gain = mean(cut.late) - mean(held_out.late) if cut else None
        placed, further = held_out, self.settings.position_seq_len
        if further and further != batch_layout.seq_len and self._due(f"loss by position to {further:,}", tokens):
            placed = self.held_out(resized(batch_layout, further), data) or held_out
        return EvaluationResult(
            held_out.loss,
            unigram_loss(self.data_pipeline.corpus.unigram_counts, self._labels(batch_layout, data)),
            held_out.by_source,
            bin_starts(placed.seq_len),
            placed.by_position,
            gain,
            rise,
            retrieval,
            retrieval["passkey"].at(stage.seq_len) if "passkey" in retrieval else None,
            tuple(self.left_out),
        )

    def judge(self, stage: StagePlan, found: EvaluationResult) -> Verdict:
        """Whether the stage's gate opens."""
        measured = {
            "validation_loss": found.loss,
            "short_loss_rise": found.short_loss_rise,
            "passkey_accuracy": found.passkey_accuracy,
        }
        return judge(stage.until, {name: value for name, value in measured.items() if value is not None})

    # Time ----------------------------------------------------------------------------------------------------

    def _affords(self, tokens: int) -> bool:
        """Whether there is time for so many tokens: rank 0's clock decides. Collective."""
        answer = torch.tensor(int(self.budget.affords(tokens)), device=self.model.device)
        dist.broadcast(answer, 0)
        return bool(answer)

    def _due(self, what: str, tokens: int, gate: bool = False) -> bool:
        """Whether it is measured now, as a gate asks for it or there is time; what is not is remembered. Collective."""
        due = gate or self._affords(tokens)
        if not due:
            self.left_out[f"{what} (evaluation.max_share)"] = None
        return due

    # Losses --------------------------------------------------------------------------------------------------

    def held_out(self, batch_layout: BatchLayout, data: ResolvedStageData, block: int = 0) -> HeldOutLosses | None:
        """Losses of the same held-out text on any ranks; None without such text. Collective.

        Args:
            batch_layout: gives the length, and who reads what.
            data: of the stage; gives the mixture, and what of a document is masked.
            block: tokens that may see each other, in stretches from the sequence's begin; 0: all.
        """
        samples = self.data_pipeline.held_out_samples(batch_layout, data, block)
        if samples is None:
            return None
        sources, count = list(samples.packed), max(1, self.settings.tokens // batch_layout.seq_len)
        device, meshes, compared = self.model.device, self.model.meshes, self.settings.context_gain_tokens
        sums = torch.zeros(
            len(sources) + 1, 2, len(bin_starts(batch_layout.seq_len)), dtype=torch.float64, device=device
        )
        with evaluating(self.model.parts), self.budget.spending(count * batch_layout.seq_len):
            for batch in self._batches(samples, count, batch_layout):
                losses = self.model.token_losses(batch)
                if losses is None or not meshes.owns_loss:
                    continue
                positions, counted = batch.plan.positions.to(device), batch.labels.to(device) != IGNORED
                for row, source in enumerate(batch.sources):
                    sums[sources.index(source)] += sum_by_bin(
                        losses[row], counted[row], positions, batch_layout.seq_len
                    )
                if compared:
                    late = counted & (positions >= compared) & (positions % compared >= compared // 2)
                    sums[-1] += sum_by_bin(losses * late, late, positions, batch_layout.seq_len)
            dist.all_reduce(sums)
            sums = sums.cpu()
        return HeldOutLosses(batch_layout.seq_len, sources, sums[:-1], sums[-1].sum(1))

    def _labels(self, batch_layout: BatchLayout, data: ResolvedStageData) -> np.ndarray:
        """The labels that `held_out` counts, `[tokens]` int64."""
        samples = self.data_pipeline.held_out_samples(batch_layout, data)
        assert samples is not None
        numbers = range(max(1, self.settings.tokens // batch_layout.seq_len))
        labels = np.concatenate([samples.sequence(number).labels for number in numbers])
        return labels[labels != IGNORED]

    def _batches(self, samples: Samples, count: int, batch_layout: BatchLayout) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the first `count` sequences, as many on every rank."""
        limited = Limited(samples, count)
        for first in range(0, count, batch_layout.sequences):
            self.busy("evaluating with the others")
            if self.may_end and any_rank(self.stopping(), device=self.model.device)[0]:
                raise _Stopped
            own = first + batch_layout.dp_rank * batch_layout.micro_batch_sequences
            yield read_rows(limited, batch_layout, [own + row for row in range(batch_layout.micro_batch_sequences)])

    # Retrieval -----------------------------------------------------------------------------------------------

    def retrieve(self, stage: StagePlan, batch_layout: BatchLayout) -> dict[str, Retrieval]:
        """Accuracy of every kind of prompt over lengths and depths. Collective.

        Args:
            batch_layout: who reads what of the stage.
        """
        settings = self.settings.passkey
        if not (settings.trials and self.data_pipeline.held_out):
            return {}
        # Those of the config, or a quarter, half and all of the stage's length, as its ranks can share them.
        unit = 2 * stage.cp * stage.tp
        own = [stage.seq_len // part // unit * unit for part in (4, 2, 1)]
        lengths = tuple(sorted({length for length in settings.lengths or own if length}))
        depths = tuple(place / max(1, settings.depths - 1) for place in range(settings.depths))
        found = {}
        for variant in settings.variants:
            accuracy = np.full((len(depths), len(lengths)), np.nan)
            # The stage's own length first, while there is time.
            for length in sorted(lengths, key=lambda length: abs(length - stage.seq_len)):
                gate = variant == "passkey" and "passkey_accuracy" in stage.until and length <= stage.seq_len
                right = self.answer(variant, depths, resized(batch_layout, length), gate)
                for place in range(min(len(depths), len(right))):
                    accuracy[place, lengths.index(length)] = np.mean(right[place :: len(depths)])
            found[variant] = Retrieval(accuracy, lengths, depths)
        return found

    def answer(self, variant: str, depths: Sequence[float], batch_layout: BatchLayout, gate: bool) -> list[bool]:
        """Of each prompt of the shape's length, depth by depth and trial by trial, whether its answer is right.

        Fewer than [evaluation.passkey] asks for, or none, where time or room is short. Collective.

        Args:
            gate: asks for it, whatever time it takes.
        """
        length, count = batch_layout.seq_len, self.settings.passkey.trials * len(depths)

        def write(number: int) -> Prompt | None:
            return self.writer.write(variant, length, depths[number % len(depths)], number)

        if not all(write(number) for number in range(count if length < LONG_ENOUGH_TOKENS else 1)):
            self.left_out[f"{variant} at {length:,} tokens, which do not hold its question"] = None
            return []
        rows = min(batch_layout.micro_batch_sequences, -(-count // batch_layout.dp))
        batch_layout = dataclasses.replace(batch_layout, micro_batch_sequences=rows)
        wrong = torch.zeros(count, dtype=torch.int64, device=self.model.device)
        tried = 0
        with evaluating(self.model.parts):
            for batch in self._batches(Prompts(variant, write), count, batch_layout):
                if not self._due(f"{variant} at {length:,} tokens", batch_layout.tokens, gate):
                    break
                tried = min(count, tried + batch_layout.sequences)
                with self.budget.spending(batch_layout.tokens):
                    found = self.model.wrong_answers(batch)
                    if found is not None and self.model.meshes.owns_loss:
                        for number, mistakes in zip(batch.numbers, found.tolist(), strict=True):
                            wrong[min(number, count - 1)] += mistakes
        dist.all_reduce(wrong)
        return (wrong[:tried] == 0).tolist()


class _Stopped(Exception):
    """An evaluation between steps is not waited for: who asks a run to stop may not have the time."""


def resized(batch_layout: BatchLayout, seq_len: int) -> BatchLayout:
    """The same ranks on sequences of another length; more tokens at once than in training if those are few."""
    tokens = batch_layout.seq_len * batch_layout.micro_batch_sequences
    sequences = max(1, max(tokens, min(4 * tokens, AT_ONCE_TOKENS)) // seq_len)
    return dataclasses.replace(batch_layout, seq_len=seq_len, micro_batches=1, micro_batch_sequences=sequences)


class Limited:
    """Samples of which those from `count` on have no label: ranks that have nothing to read read one of them."""

    def __init__(self, samples: Samples, count: int) -> None:
        self.samples, self.count = samples, count

    def sequence(self, number: int) -> PackedSequence:
        sequence = self.samples.sequence(min(number, self.count - 1))
        nothing = np.full_like(sequence.labels, IGNORED)
        return sequence if number < self.count else dataclasses.replace(sequence, labels=nothing)

    def document_lengths(self, number: int) -> tuple[int, ...]:
        return self.samples.document_lengths(min(number, self.count - 1))


class Prompts:
    """Prompts as samples."""

    def __init__(self, variant: str, write: Callable[[int], Prompt | None]) -> None:
        self.variant, self.write = variant, write

    def sequence(self, number: int) -> PackedSequence:
        prompt = self.write(number)
        assert prompt is not None, "the length was tried"
        length = len(prompt.tokens)
        span = Span(self.variant, 0, 0, length)
        return PackedSequence(prompt.tokens, prompt.labels, np.arange(length), (length,), (span,))

    def document_lengths(self, number: int) -> tuple[int, ...]:
        return (len(self.sequence(number).tokens),)
