"""`torchtitan-cp preview CONFIG` prints samples of a stage as the model gets them: what is learned, and what was cut.

It prepares the corpus where a run would, so that a run begins with it. It needs neither ranks nor a model.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.cli.command import run_command
from torchtitan_cp.cli.options import at_least, config_parser, parse_with_overrides
from torchtitan_cp.config import Config, ConfigError, load_config
from torchtitan_cp.config.check import check_stages
from torchtitan_cp.config.data import check_sources, check_stage_data
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.curriculum import ResolvedStage, resolve_stages
from torchtitan_cp.data.batches.packed_stream import PackedSequence, Span
from torchtitan_cp.data.batches.samples import StageSamples
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.documents import check_corpus
from torchtitan_cp.data.corpus.store import TokenStore
from torchtitan_cp.data.corpus.tokenizer import Tokenizer
from torchtitan_cp.training.data_pipeline import DataPipeline
from torchtitan_cp.training.registry import start_folder
from torchtitan_cp.training.resolve import with_defaults

LEARNED = "bold green"
MARKS = "[[", "]]"  # around what is learned, where there is no color
CONTEXT = 16  # tokens that are decoded before others, because a tokenizer may drop the space before a first token
ONE_RANK = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}


def main(arguments: list[str]) -> int:
    parser = config_parser(
        "preview",
        "Samples of a stage as the model gets them: text, what of it is learned, borders of documents, lengths, cuts.",
    )
    parser.add_argument("--source", metavar="NAME", help="only samples of this source")
    parser.add_argument("--stage", type=at_least(1), metavar="N", default=1, help="number of the stage (default 1)")
    parser.add_argument("--samples", type=at_least(1), metavar="N", default=3, help="how many (default 3)")
    parser.add_argument(
        "--tokens",
        type=at_least(0),
        metavar="N",
        default=400,
        help="of a document that are shown, half of them from each end (default 400); 0: all",
    )
    options, overrides = parse_with_overrides(parser, arguments)
    return run_command(lambda: _preview(load_config(options.config, overrides), options), options.config)


def stages_without_ranks(config: Config) -> tuple[ResolvedStage, ...]:
    """The stages of a config as one rank would run them: which text they read depends on no degree.

    Args:
        config: as `with_defaults` returns it.

    Raises:
        ConfigError: [data] or a stage's `data` breaks a rule.
    """

    def on_one_rank(stage: Stage) -> Stage:
        return replace(stage, cp=None, tp=None, pp=None)

    check_sources(config.data, has_tokenizer=not config.tokenizer.trained)
    stages = tuple(map(on_one_rank, config.curriculum.stages))
    resolved = resolve_stages(config.with_keys(parallel=ONE_RANK, curriculum={"stages": stages}), 1)
    for stage in resolved:
        check_stage_data(config.data, stage.data, stage.seq_len, f"{stage.where}.data")
    return resolved


def read_stage(config: Config, stages: tuple[ResolvedStage, ...], stage: ResolvedStage) -> DataPipeline:
    """The text of a stage as a run reads it that takes every planned step before it. The corpus is prepared.

    Raises:
        UserError: it cannot be prepared, or a source ends before the stage does.
    """
    check_corpus(config.data)
    corpus = prepare(config.data, config.tokenizer, start_folder(config.model))
    pipeline, read = DataPipeline(config, corpus, max(each.seq_len for each in stages)), dict[str, int]()
    for earlier in stages[: stage.index]:
        pipeline.start_stage(earlier, Progress(stage=earlier.index, source_tokens=read))
        read = read | pipeline.samples.tokens_after(earlier.steps)
    pipeline.start_stage(stage, Progress(stage=stage.index, source_tokens=read))
    return pipeline


def _preview(config: Config, options: argparse.Namespace) -> int:
    """Print the stage, its sources and its first samples. Returns the exit code."""
    check_stages(config)
    config = with_defaults(config)
    stages = stages_without_ranks(config)
    stage = _chosen_stage(config, stages, options)
    pipeline = read_stage(config, stages, stage)
    samples, corpus = pipeline.samples, pipeline.corpus
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"stage {stage.index + 1}, {stage.name}: {stage.steps:,} steps of {samples.step_sequences:,} sequences of "
        f"{stage.seq_len:,} tokens{pipeline.describe_stage(stage)}"
    )
    for name in samples.packed:
        found = corpus.sources[name].statistics
        console.print(f"{name}: {found.train.documents:,} documents, {found.train.tokens:,} tokens{found.left_out()}")
    page = Page(console, corpus.tokenizer, options.tokens)
    shown = _numbers(samples, options)
    if any(samples.packed[samples.mixture.sample(number)[0]].stream.store.has_masks for number in shown):
        marks = "green" if page.has_color else f"between {' and '.join(MARKS)}"
        console.print(f"What is learned of conversations is {marks}.")
    for number in shown:
        source = samples.mixture.sample(number)[0]
        page.print_sequence(number, samples.sequence(number), samples.packed[source].stream.store)
    if len(shown) < options.samples:
        console.print(f"The stage has no more{f' of {options.source}' * bool(options.source)}.")
    return 0


def _chosen_stage(config: Config, stages: tuple[ResolvedStage, ...], options: argparse.Namespace) -> ResolvedStage:
    """The stage that --stage names, if it reads the source that --source names.

    Raises:
        ConfigError: there is no such stage or source, or the stage does not read it.
    """
    name, known = options.source, list(config.data.by_name())
    if options.stage > len(stages):
        raise ConfigError(f"--stage {options.stage} does not exist", fix=f"give one of 1 to {len(stages)}")
    if name is not None and name not in known:
        raise ConfigError(f"--source {name!r} is not known", fix=f"give one of {', '.join(known)}")
    reading = [stage.index + 1 for stage in stages if not stage.data.mixture or stage.data.mixture.get(name)]
    if name is not None and options.stage not in reading:
        fix = f"give --stage {reading[0]}" if reading else "give it a weight in a mixture, or preview another source"
        raise ConfigError(f"stage {options.stage} reads nothing of the source {name!r}", fix=fix)
    return stages[options.stage - 1]


def _numbers(samples: StageSamples, options: argparse.Namespace) -> list[int]:
    """The numbers of the stage's first samples, of the chosen source."""
    found = list[int]()
    for number in range(samples.steps * samples.step_sequences):
        if options.source in (None, samples.mixture.sample(number)[0]):
            found.append(number)
        if len(found) == options.samples:
            break
    return found


class Page:
    """Prints sequences to a terminal of any width, or as plain lines.

    Args:
        shown_tokens: of a document, half of them from each end; 0: all.
    """

    def __init__(self, console: Console, tokenizer: Tokenizer, shown_tokens: int) -> None:
        self.console, self.tokenizer, self.shown_tokens = console, tokenizer, shown_tokens
        self.has_color = console.color_system is not None and not console.no_color
        self.special = {index: token.content for token, index in tokenizer.added.items() if token.special}

    def print_sequence(self, number: int, row: PackedSequence, store: TokenStore) -> None:
        """Print one sequence of a stage: a headline, and each document under a rule."""
        # The label of a token is the next one.
        learned = np.append(False, row.labels[:-1] != IGNORED)
        counted = int((row.labels != IGNORED).sum())
        lengths = [span.stop - span.start for span in row.spans]
        padding = len(row.tokens) - sum(lengths)
        parts = len(row.document_lengths) - len(lengths) - (padding > 0)
        notes = [f"{len(row.tokens):,} tokens", f"{len(lengths):,} document{'s' * (len(lengths) > 1)}"]
        notes += [f"{counted:,} learned"] + [f"{padding:,} padding"] * (padding > 0)
        notes += [f"attention is cut into pieces of up to {max(row.document_lengths):,} tokens"] * (parts > 0)
        self.console.print(f"\nsequence {number + 1}, {row.spans[0].source}: {', '.join(notes)}", style="bold")
        edges = np.cumsum([0, *lengths]).tolist()
        for span, (start, stop) in zip(row.spans, pairwise(edges), strict=True):
            self._print_rule(_describe(span, store))
            marked = learned[start:stop] if store.has_masks else np.zeros(stop - start, dtype=bool)
            self.console.print(self._text(row.tokens[start:stop].tolist(), marked))
        if padding:
            self._print_rule(f"padding: {padding:,} tokens, not learned")

    def _print_rule(self, title: str) -> None:
        """A line with a title that is as wide as the terminal where it fits."""
        line = f"-- {title} "
        self.console.print(line + "-" * (min(self.console.width, 100) - len(line)), style="dim")

    def _text(self, ids: list[int], learned: np.ndarray) -> Text:
        """The text of a document, with what is learned colored or between marks."""
        text, half = Text(), self.shown_tokens // 2
        hidden = len(ids) - 2 * half if 0 < self.shown_tokens < len(ids) else 0
        shown = [(0, half), (len(ids) - half, len(ids))] if hidden else [(0, len(ids))]
        before, after = ("", "") if self.has_color else MARKS
        for number, (first, last) in enumerate(shown):
            text.append(f"\n... {hidden:,} tokens ...\n" * number, style="dim")
            flags = learned[first:last]
            borders = [first, *(np.flatnonzero(np.diff(flags)) + 1 + first).tolist(), last]
            for start, stop in pairwise(borders):
                piece = _printable("".join(self._pieces(ids, start, stop)))
                if start < stop and learned[start]:
                    text.append(f"{before}{piece}{after}", style=LEARNED)
                else:
                    text.append(piece)
        return text

    def _pieces(self, ids: list[int], start: int, stop: int) -> Iterator[str]:
        """The text of tokens `start` to `stop`, special ones by name."""
        for place in range(start, stop + 1):
            if place == stop or ids[place] in self.special:
                context = ids[max(0, start - CONTEXT) : start]
                before, whole = self.tokenizer.decode(context), self.tokenizer.decode([*context, *ids[start:place]])
                yield whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(ids[start:place])
                yield from [self.special[ids[place]]] if place < stop else []
                start = place + 1


def _describe(span: Span, store: TokenStore) -> str:
    """Which part of which document a span is, and where it was cut."""
    length = int(store.document_lengths[span.document])
    said = f"document {span.document:,}: "
    if (span.start, span.stop) == (0, length):
        return said + f"{length:,} tokens"
    cuts = [place for place in (span.start, span.stop) if 0 < place < length]
    masks = [store.read_mask(span.document, place - 1, place + 1) for place in cuts]
    inside = any(mask is not None and mask.all() for mask in masks)
    ends = " and ".join(["begins"] * (span.start > 0) + ["goes on"] * (span.stop < length))
    said += f"tokens {span.start:,} to {span.stop:,} of {length:,}, it {ends} in another sequence"
    return said + ", cut inside a learned turn" * inside


def _printable(text: str) -> str:
    """Text without characters that steer a terminal: they are shown as escapes."""

    def is_shown(character: str) -> bool:
        return character.isprintable() or character in "\n\t" or (character.isspace() and character >= "\xa0")

    return "".join(character if is_shown(character) else ascii(character)[1:-1] for character in text)
