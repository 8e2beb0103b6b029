"""What a run reads: the sources as streams, a stage's sequences, and the text held out."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.curriculum import StagePlan
from torchtitan_cp.data import PreparedCorpus, SeparatedStore, TokenStream
from torchtitan_cp.data.batches.loader import BatchLayout, MicroBatch, read_steps
from torchtitan_cp.data.batches.packing import Packing
from torchtitan_cp.data.batches.samples import Sampling, StageSamples, held_out_samples


class DataPipeline:
    """The corpus on this rank.

    Args:
        config: of the run.
        corpus: prepared.
        block_tokens: tokens that stay together in the order of a stream: the longest sequence.

    Attributes:
        streams: by source, what is trained on; held_out: what is not, of the sources that hold something out.
        samples: of the stage entered.
    """

    def __init__(self, config: Config, corpus: PreparedCorpus, block_tokens: int) -> None:
        settings = config.data
        if settings.separator >= corpus.tokenizer.vocab_size:
            raise ConfigError(
                f"data.separator = {settings.separator} is no token: there are {corpus.tokenizer.vocab_size}",
                fix="give the id of one, or -1 for none",
            )

        def separated(store: Any) -> Any:
            return SeparatedStore(store, settings.separator) if settings.separator >= 0 else store

        self.config, self.corpus, self.block_tokens = config, corpus, block_tokens
        self.streams = {
            name: TokenStream(separated(source.train), block_tokens, config.training.seed, order=settings.order)
            for name, source in corpus.sources.items()
        }
        self.held_out = {
            name: TokenStream(separated(source.validation), block_tokens, 0, shuffle=False)
            for name, source in corpus.sources.items()
            if source.validation.tokens
        }

    def check_gates(self, stages: tuple[StagePlan, ...]) -> None:
        """Refuse a gate without text to measure on."""
        for stage in stages:
            weights = self.sampling_of(stage).weights
            if stage.until and not any(weights.get(name) for name in self.held_out):
                raise ConfigError(
                    f"curriculum.stages[{stage.index}] has until, which looks at held-out text, and none of its "
                    "sources holds any out",
                    fix="set validation_fraction of a source above 0, or give the stage steps",
                )

    def enter(self, stage: StagePlan, taken: Mapping[str, int], passed: int = 0) -> None:
        """Read the stage's sequences from here on.

        Args:
            taken: tokens of each source that earlier stages took.
            passed: steps of text that the stage reads beyond its own, as so many are passed over.
        """
        self.samples = self.samples_of(stage, taken, passed)

    def samples_of(self, stage: StagePlan, taken: Mapping[str, int], passed: int = 0) -> StageSamples:
        """The sequences of a stage; see `enter`."""
        sampling, sequences = self.sampling_of(stage), stage.global_batch_tokens // stage.seq_len
        return StageSamples(
            self.streams,
            stage.seq_len,
            sampling,
            self.config.training.seed,
            stage.index,
            sequences,
            taken,
            stage.steps,
            passed,
        )

    def sampling_of(self, stage: StagePlan) -> Sampling:
        """How a stage takes its text."""
        text = stage.data
        weights = text.mixture or {name: float(stream.store.tokens) for name, stream in self.streams.items()}
        return Sampling(
            weights,
            Packing(text.packing, text.packing_window, text.document_mask, text.restart_positions),
            text.short_share,
            text.short_seq_len,
            text.growth_from,
            text.growth_steps,
            self.config.data.max_epochs,
        )

    def steps(
        self, first: int, count: int, batch_layout: BatchLayout, *, pin: bool
    ) -> Iterator[tuple[MicroBatch, ...]]:
        """This rank's micro-batches of `count` steps of the stage from `first` on, read ahead."""
        settings = self.config.data
        return read_steps(
            self.samples,
            first,
            count,
            batch_layout,
            workers=settings.workers,
            read_ahead=settings.prefetch_batches,
            pin=pin,
        )

    def held_out_samples(self, batch_layout: BatchLayout, sampling: Sampling, block: int = 0) -> StageSamples | None:
        """Sequences to measure on, of a stage's sources; None where those hold nothing out.

        Args:
            batch_layout: gives the length, and how many sequences are one round on all ranks.
            sampling: of the stage.
            block: tokens that may see each other; 0: all.
        """
        weights, packing = sampling.weights, sampling.packing
        return held_out_samples(self.held_out, batch_layout.seq_len, weights, packing, batch_layout.sequences, block)

    def filler(self, number: int, count: int) -> np.ndarray:
        """Held-out tokens, `[count]` int64, other ones for each number as far as there are."""
        return max(self.held_out.values(), key=lambda stream: stream.store.tokens).read(number * count, count)

    def describe(self, stage: StagePlan) -> str:
        """What is special about the text of a stage, in words."""
        text, said = stage.data, []
        if len(self.streams) > 1:
            total = sum(self.samples.sampling.weights.values())
            shares = (f"{name} {weight / total:.0%}" for name, weight in self.samples.sampling.weights.items())
            said.append("mixture " + ", ".join(shares))
        if text.packing != "concat":
            largest = max(self.samples.packed.values(), key=lambda packed: packed.samples or 0)
            whole = largest.report(0).whole_fraction
            said.append(f"packed by {text.packing}, {whole:.0%} of the first window's documents whole")
        if text.document_mask:
            said.append("documents masked")
        if text.short_share:
            said.append(f"{text.short_share:.0%} of the sequences in stretches of {text.short_seq_len:,}")
        if text.growth_from:
            said.append(f"attention grows from {text.growth_from:,} over {text.growth_steps} steps")
        return "".join("; " + each for each in said)

    def describe_epochs(self, steps: int) -> str:
        """How often each source was read after so many steps of the stage, in words."""
        epochs = self.samples.epochs_after(steps).items()
        return "read so far: " + ", ".join(f"{name} {count:.2f} times" for name, count in epochs)
