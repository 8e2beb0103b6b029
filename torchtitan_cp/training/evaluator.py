"""Evaluation between steps: losses on held-out text, retrieval of planted keys, and a stage's gate."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.degrees import length_unit
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.curriculum import ResolvedStage
from torchtitan_cp.data.batches.micro_batches import BatchLayout, MicroBatch, collate
from torchtitan_cp.data.batches.packed_stream import PackedSequence, Span
from torchtitan_cp.data.batches.samples import held_out_samples
from torchtitan_cp.evaluation.held_out import evaluating, unigram_loss
from torchtitan_cp.evaluation.prompts import Frame, Prompt, PromptWriter
from torchtitan_cp.evaluation.result import EvaluationResult, Retrieval
from torchtitan_cp.optim.loss import wrong_answers
from torchtitan_cp.runtime.signals import any_rank
from torchtitan_cp.training.chat import chat_template_of, prompt_frame
from torchtitan_cp.training.data_pipeline import DataPipeline
from torchtitan_cp.training.evaluation_time import EvaluationTime
from torchtitan_cp.training.held_out_losses import HeldOutLosses, LossSums, means
from torchtitan_cp.training.model import ParallelModel

logger = logging.getLogger(__name__)

LONG_PROMPT_TOKENS = 8192  # any needles and question fit into so many
FORWARD_TOKENS = 16384  # of one forward on a rank: no activations are kept for a backward


@dataclass(eq=False)
class Evaluator:
    """Evaluates the model between steps and changes nothing in it.

    Args:
        model, data_pipeline: what trains; both follow the trainer from stage to stage.
        stages: of the curriculum. In every stage, `loss` is measured on the mixture of the first stage that holds text
            out; short_loss_rise compares the loss at the first stage's length with that at its end.
        set_activity: tells the watchdog what this rank does.
        stop_requested: whether this rank was asked to stop.
        depths: positions of a planted key, evenly from the start of a prompt to its question.

    Attributes:
        show_progress: takes what is measured, and how many of how many sequences are done.
        time: what the current evaluation has time for, and what it left out.
    """

    model: ParallelModel
    data_pipeline: DataPipeline
    stages: Sequence[ResolvedStage]
    set_activity: Callable[[str], None]
    stop_requested: Callable[[], bool]
    depths: int = 5

    def __post_init__(self) -> None:
        config, encode = self.data_pipeline.config, self.data_pipeline.corpus.tokenizer.encode_chat_batch
        self.settings = config.evaluation
        self.time = EvaluationTime(self.settings.max_share, self.model.device)
        self.show_progress: Callable[[str, int, int], None] = lambda measure, done, count: None
        self.skips_logged = set[tuple[int, ...]]()
        conversations = any(source.conversations for source in config.data.by_name().values())
        self.chat_template = chat_template_of(config) if conversations else None
        filler = self.data_pipeline.filler
        self.prompts = PromptWriter(lambda text: encode([text])[0][0], filler, self.settings.passkey)

    def evaluate(
        self, stage: ResolvedStage, batch_layout: BatchLayout, progress: Progress, *, at_end: bool
    ) -> EvaluationResult | None:
        """Measure what [evaluation] asks for, as time permits, and what the stage's gate needs. Collective.

        Args:
            batch_layout: which rank reads which sequences of the stage.
            progress: holds the loss at the first stage's length, measured at that stage's end.
            at_end: the stage is trained; before its end an evaluation may be skipped.

        Returns:
            None if nothing is held out, there is no time, or a stop was requested.
        """
        self.time.begin(within_stage=not (at_end or stage.until))
        common, own = self._common_weights(), self._weights(stage)
        passes = 1 if own in ({}, common) else 2
        losses_tokens = passes * max(self.settings.tokens, stage.seq_len)
        if not (at_end or stage.until or self.time.affords(losses_tokens)):
            when = f"after step {progress.step}" if progress.step else "before the first step"
            share = self.time.wanted_share(losses_tokens)
            why = f"no evaluation {when}: those before a stage's end may take half of {share}"
            self._log_skip((stage.index, progress.step > 0), why)
            return None
        layout = resized(batch_layout, stage.seq_len)
        try:
            held_out = self.held_out_losses(layout, stage, weights=common)
            if held_out is None:
                self._log_skip((), "no evaluations: no source of a stage holds text out (data.validation_fraction)")
                return None
            own_loss = "loss on the stage's own mixture"
            of_stage = (self.held_out_losses(layout, stage, measure=own_loss) if passes == 2 else None) or held_out
            rise = self._short_loss_rise(stage, layout, progress, at_end)
            gain = self._context_gain(of_stage, layout, stage, own or common)
            retrieval, by_position = self.measure_retrieval(stage, layout), of_stage
            length = self.settings.position_seq_len or stage.seq_len
            to_length = f"loss by position to {length:,}"
            if length != stage.seq_len and self.time.is_due(to_length, tokens=length):
                longer = resized(layout, length)
                by_position = self.held_out_losses(longer, stage, weights=own or common, measure=to_length) or of_stage
        except _Stopped:
            logger.info("evaluation stopped: the run is stopping%s", "; the next start runs it" * at_end)
            return None
        by_source = {**of_stage.by_source, **held_out.by_source}
        epochs = {**of_stage.epochs, **{name: read for name, read in held_out.epochs.items() if read}}
        accuracy = retrieval["passkey"].at(stage.seq_len) if "passkey" in retrieval else None
        self._note_unmeasured(stage, held_out, of_stage if own else None, by_source, epochs)
        if "passkey" in retrieval and min(retrieval["passkey"].lengths) > stage.seq_len:
            self.time.left_out.append(
                f"passkey accuracy: evaluation.passkey.lengths has none up to {stage.seq_len:,} tokens"
            )
        by_turn = of_stage.by_turn if of_stage.by_turn.any() else held_out.by_turn
        return EvaluationResult(
            loss=held_out.loss,
            stage_loss=of_stage.loss if own else None,
            unigram=unigram_loss(self.data_pipeline.corpus.unigram_counts, held_out.label_counts.numpy()),
            by_source={name: by_source.get(name, math.nan) for name in self.data_pipeline.held_out if name in epochs},
            position_starts=by_position.starts,
            position_losses=means(by_position.by_bin.sum(0)),
            turn_losses=means(by_turn) if by_turn.any() else [],
            context_gain=gain,
            short_loss_rise=rise,
            retrieval=retrieval,
            passkey_accuracy=accuracy,
            held_out_epochs=epochs,
            left_out=tuple(dict.fromkeys(self.time.left_out)),
        )

    def _log_skip(self, occasion: tuple[int, ...], text: str) -> None:
        """Log why there is no evaluation, once on an occasion: a stage would have ten."""
        if occasion not in self.skips_logged:
            self.skips_logged.add(occasion)
            logger.info(text)

    def _note_unmeasured(
        self,
        stage: ResolvedStage,
        common: HeldOutLosses,
        of_stage: HeldOutLosses | None,
        by_source: dict[str, float],
        epochs: dict[str, float],
    ) -> None:
        """Note the losses that are not numbers.

        Args:
            common: on the mixture of every stage; of_stage: on the stage's own, None if that holds nothing out.
            by_source, epochs: of both.
        """
        none_learned = "no held-out token of it is learned"
        if of_stage is None:
            self.time.left_out.append("the loss on the stage's own mixture, whose sources hold nothing out")
        elif math.isnan(of_stage.loss):
            self.time.left_out.append(f"the loss on the stage's own mixture: {none_learned}")
        if math.isnan(common.loss):
            self.time.left_out.append(f"the loss: {none_learned}")
        too_few = f"evaluation.tokens = {self.settings.tokens} gives it no sequence of {stage.seq_len:,} tokens"
        for name, read in epochs.items():
            if name not in by_source:
                self.time.left_out.append(f"the loss of {name}: {none_learned if read else too_few}")

    def _weights(self, stage: ResolvedStage) -> dict[str, float]:
        """The fractions of the stage's mixture among the sources that hold text out; empty if none of them does."""
        mixture = self.data_pipeline.stage_data(stage).mixture
        weights = {name: mixture[name] for name in self.data_pipeline.held_out if mixture.get(name)}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

    def _common_weights(self) -> dict[str, float]:
        """The mixture on which the loss is measured in every stage: that of the first which holds text out."""
        return next(filter(None, map(self._weights, self.stages)), {})

    # Losses --------------------------------------------------------------------------------------------------

    def held_out_losses(
        self,
        batch_layout: BatchLayout,
        stage: ResolvedStage,
        block: int = 0,
        tokens: int = 0,
        weights: Mapping[str, float] | None = None,
        measure: str = "loss on held-out text",
    ) -> HeldOutLosses | None:
        """Losses of held-out text, the same text on any number of ranks; None if there is none. Collective.

        Args:
            batch_layout: gives the length, and which rank reads which sequences.
            stage: gives the mixture and the document mask.
            block: cut documents into blocks of this many tokens that cannot attend to each other; 0: do not.
            tokens: how much text; 0: evaluation.tokens.
            weights: mixture of the sources; None: the stage's.
            measure: what is measured, for `show_progress`.
        """
        seq_len = batch_layout.seq_len
        count = max(1, (tokens or self.settings.tokens) // seq_len)
        data = self.data_pipeline.stage_data(stage)
        data = data if weights is None else replace(data, mixture=dict(weights))
        samples = held_out_samples(self.data_pipeline.held_out, seq_len, data, count, block)
        if samples is None:
            return None
        vocab_size = self.data_pipeline.corpus.tokenizer.vocab_size
        sums = LossSums(samples, seq_len, count, self.settings.context_gain_tokens, vocab_size, self.model.device)
        with evaluating(self.model.parts), self.time.budget.spending(count * seq_len):
            for batch in self._batches(samples.sequence, count, _fitted(batch_layout, count), measure):
                result = self.model.forward(batch, self.model.token_loss)
                if result is not None and self.model.meshes.owns_loss:
                    sums.add(batch, result[1])
            return sums.over_ranks()

    def _short_loss_rise(
        self, stage: ResolvedStage, batch_layout: BatchLayout, progress: Progress, at_end: bool
    ) -> float | None:
        """The fraction by which the loss at the first stage's length rose; None if it is not measured."""
        first, measure = self.stages[0], "the loss at the first stage's length"
        before, tokens = progress.short_loss, progress.short_tokens or self.settings.tokens
        # A stage with a gate may end with any evaluation.
        if not (stage.index and (at_end or stage.until)):
            return None
        if not before or math.isnan(before):
            self.time.left_out.append(f"{measure}, which was not measured at that stage's end")
            return None
        if first.seq_len % length_unit(stage.cp, stage.tp):
            self.time.left_out.append(f"{measure}, which cp x tp = {stage.cp * stage.tp} ranks cannot share")
            return None
        if not self.time.is_due(measure, "short_loss_rise" in stage.until, tokens=max(tokens, first.seq_len)):
            return None
        layout, weights = resized(batch_layout, first.seq_len), self._common_weights()
        now = self.held_out_losses(layout, first, tokens=tokens, weights=weights, measure=measure)
        return now.loss / before - 1 if now else None

    def _context_gain(
        self, held_out: HeldOutLosses, batch_layout: BatchLayout, stage: ResolvedStage, weights: Mapping[str, float]
    ) -> float | None:
        """How much lower the loss is with the whole context than within blocks; None if it is not measured.

        Args:
            held_out: the losses with the whole context, on the mixture of these weights.
        """
        block, seq_len = self.settings.context_gain_tokens, batch_layout.seq_len
        if not block:
            return None
        if seq_len < 2 * block:
            needed = f"2 x evaluation.context_gain_tokens = {2 * block:,}"
            self.time.left_out.append(f"context gain: {seq_len:,} tokens are fewer than {needed}")
            return None
        if not held_out.late[1]:
            self.time.left_out.append(
                f"context gain: no learned token lies in the second half of a block of {block:,} tokens"
            )
            return None
        if not self.time.is_due("context gain", tokens=max(self.settings.tokens, seq_len)):
            return None
        in_blocks = self.held_out_losses(batch_layout, stage, block, weights=weights, measure="context gain")
        return means(in_blocks.late) - means(held_out.late) if in_blocks else None

    def _batches(
        self, read: Callable[[int], PackedSequence], count: int, batch_layout: BatchLayout, measure: str
    ) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the first `count` sequences; every rank gets equally many."""
        rows = batch_layout.micro_batch_sequences

        def read_limited(number: int) -> PackedSequence:
            # Behind the end the last sequence is repeated, without labels.
            sequence = read(min(number, count - 1))
            no_labels = np.full_like(sequence.labels, IGNORED)
            return sequence if number < count else replace(sequence, labels=no_labels)

        for first in range(batch_layout.dp_rank * rows, count + batch_layout.dp_rank * rows, batch_layout.sequences):
            self.set_activity("evaluating with the others")
            self.show_progress(measure, first - batch_layout.dp_rank * rows, count)
            if any_rank(self.stop_requested(), device=self.model.device)[0]:
                raise _Stopped
            yield collate(read_limited, batch_layout, list(range(first, first + rows)))

    # Retrieval -----------------------------------------------------------------------------------------------

    def measure_retrieval(self, stage: ResolvedStage, batch_layout: BatchLayout) -> dict[str, Retrieval]:
        """Accuracy of each variant of prompts by length and depth. Collective."""
        passkey = self.settings.passkey
        if not (passkey.trials and self.data_pipeline.held_out):
            return {}
        # By default a quarter, half and all of the stage's length, rounded down to what its ranks can share.
        unit = length_unit(stage.cp, stage.tp)
        default = [stage.seq_len // part // unit * unit for part in (4, 2, 1)]
        lengths = tuple(sorted({length for length in passkey.lengths or default if length}))
        depths = tuple(number / max(1, self.depths - 1) for number in range(self.depths))
        try:
            self.prompts.frame = self._frame(stage)
        except ConfigError as error:
            self.time.left_out.append(f"retrieval: {error.message}")
            return {}
        by_variant = {}
        for variant in passkey.variants:
            accuracy = np.full((len(depths), len(lengths)), np.nan)
            # The stage's own length first, while there is time.
            for length in sorted(lengths, key=lambda length: abs(length - stage.seq_len)):
                for_gate = variant == "passkey" and "passkey_accuracy" in stage.until and length <= stage.seq_len
                right = self.answer_prompts(variant, depths, resized(batch_layout, length), for_gate)
                for row in range(min(len(depths), len(right))):
                    accuracy[row, lengths.index(length)] = np.mean(right[row :: len(depths)])
            by_variant[variant] = Retrieval(accuracy, lengths, depths)
        return by_variant

    def _frame(self, stage: ResolvedStage) -> Frame:
        """What stands around a prompt: the chat template if the stage reads conversations, else BOS if there is one."""
        config, mixture = self.data_pipeline.config, self.data_pipeline.stage_data(stage).mixture
        if not any(source.conversations and mixture.get(name) for name, source in config.data.by_name().items()):
            return Frame(np.array(self.data_pipeline.corpus.tokenizer.bos_ids, np.int64))
        assert self.chat_template, "the corpus was made with one"
        return prompt_frame(self.chat_template, self.data_pipeline.corpus.tokenizer)

    def answer_prompts(
        self, variant: str, depths: Sequence[float], batch_layout: BatchLayout, for_gate: bool
    ) -> list[bool]:
        """Whether each prompt of the layout's length is answered right: all depths of the first trial, and so on.

        The list is shorter if time runs out, and empty if needles and question do not fit. Collective.

        Args:
            for_gate: the stage's gate needs the answers, whatever time they take.
        """
        length, count = batch_layout.seq_len, self.settings.passkey.trials * len(depths)

        def write(number: int) -> Prompt | None:
            return self.prompts.write(variant, length, depths[number % len(depths)], number)

        def read(number: int) -> PackedSequence:
            prompt = write(number)
            assert prompt, "a shorter length was refused before"
            return PackedSequence(*prompt, np.arange(length), (length,), (Span(variant, 0, 0, length),))

        if not all(write(number) for number in range(count if length < LONG_PROMPT_TOKENS else 1)):
            self.time.left_out.append(f"{variant} at {length:,} tokens, too short for its question")
            return []
        batch_layout = _fitted(batch_layout, count)
        mistakes = torch.zeros(count, dtype=torch.int64, device=self.model.device)
        tried, measure = 0, f"{variant} at {length:,} tokens"
        with evaluating(self.model.parts):
            for batch in self._batches(read, count, batch_layout, measure):
                left = max(0, (count - tried) * length - batch_layout.tokens)
                if not self.time.is_due(measure, for_gate, tokens=batch_layout.tokens, later_tokens=left):
                    break
                tried = min(count, tried + batch_layout.sequences)
                with self.time.budget.spending(batch_layout.tokens):
                    wrong = self.model.forward(batch, wrong_answers)
                    if wrong is not None and self.model.meshes.owns_loss:
                        for number, wrong_tokens in zip(batch.numbers, wrong.tolist(), strict=True):
                            mistakes[min(number, count - 1)] += wrong_tokens
        dist.all_reduce(mistakes)
        return (mistakes[:tried] == 0).tolist()


class _Stopped(Exception):
    """A stop was requested, and the evaluation ends at once."""


def resized(batch_layout: BatchLayout, seq_len: int) -> BatchLayout:
    """The layout with sequences of another length, and more tokens in a forward than in training if those are few."""
    tokens = batch_layout.seq_len * batch_layout.micro_batch_sequences
    sequences = max(1, max(tokens, min(4 * tokens, FORWARD_TOKENS)) // seq_len)
    return replace(batch_layout, seq_len=seq_len, micro_batches=1, micro_batch_sequences=sequences)


def _fitted(batch_layout: BatchLayout, count: int) -> BatchLayout:
    """The layout with micro-batches no larger than a rank's share of `count` sequences."""
    rows = min(batch_layout.micro_batch_sequences, -(-count // batch_layout.dp))
    return replace(batch_layout, micro_batch_sequences=rows)
