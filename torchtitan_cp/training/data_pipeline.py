"""What a run reads: the sources as streams, a stage's sequences, and the held-out text."""

import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.config import Config
from torchtitan_cp.config.data import ResolvedStageData
from torchtitan_cp.curriculum import ResolvedStage
from torchtitan_cp.data.batches.loader import READ_AHEAD, read_steps
from torchtitan_cp.data.batches.micro_batches import BatchLayout, MicroBatch
from torchtitan_cp.data.batches.samples import StageSamples
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.corpus.cache import CacheBuilder, CacheLocations, PreparedCorpus, open_cache, prepare
from torchtitan_cp.data.corpus.tokenizer import Tokenizer, load_tokenizer
from torchtitan_cp.data.errors import PreparationStoppedError
from torchtitan_cp.runtime.consistency import DIGEST, check_agreement
from torchtitan_cp.runtime.nodes import is_first_of_node, node_name, nodes_not_sharing
from torchtitan_cp.training.registry import start_folder

POLL_SECONDS = 0.5


def tokenizer_of(config: Config) -> Tokenizer:
    """The run's tokenizer: read from its file, or trained on the corpus.

    Raises:
        UserError: the file, or the corpus, cannot be read.
    """
    if not config.tokenizer.trained:
        if config.tokenizer.path and not Path(os.path.expanduser(config.tokenizer.path)).exists():
            start_folder(config.model)  # if it is a name on the hub, this downloads its tokenizer again
        return load_tokenizer(config.tokenizer)
    return prepare(config.data, config.tokenizer, start_folder(config.model)).tokenizer


def prepare_corpus(config: Config, stop_requested: Callable[[], bool]) -> PreparedCorpus:
    """Prepare the corpus: one rank of each node builds what the cache lacks, and then all open it. Collective.

    On nodes that share rank 0's cache folder only rank 0 builds, since file locks may not work across nodes. Ranks
    wait by polling the store, as preparation may take hours, longer than a collective may wait.

    Args:
        stop_requested: whether this rank was asked to stop, which then stops all ranks.

    Raises:
        UserError: the corpus cannot be prepared, or ranks have different tokens.
        PreparationStoppedError: a rank was asked to stop; raised on all ranks.
    """
    from_rank_0 = [uuid.uuid4().hex, node_name()]
    dist.broadcast_object_list(from_rank_0)
    prefix, first_node = from_rank_0
    store, node = dist.PrefixStore(prefix, distributed_c10d._get_default_store()), node_name()
    next_poll_seconds = 0.0

    def any_rank_stops() -> bool:
        nonlocal next_poll_seconds
        if time.monotonic() < next_poll_seconds:
            return False
        next_poll_seconds = time.monotonic() + POLL_SECONDS
        if stop_requested():
            store.set("stop", "")
        return store.check(["stop"])

    def wait_until(condition: Callable[[], bool]) -> None:
        seconds = 0.01
        while not condition():
            any_rank_stops()
            time.sleep(seconds)
            seconds = min(2 * seconds, POLL_SECONDS)

    cache_folder = Path(os.path.expanduser(config.data.cache_folder))
    has_own_folder = bool(nodes_not_sharing(cache_folder)[dist.get_rank()])
    if dist.get_rank() == 0 or has_own_folder:
        try:
            start = start_folder(config.model)
            built: CacheLocations | Exception = CacheBuilder(
                config.data, config.tokenizer, any_rank_stops, start
            ).build()
        except Exception as error:
            built = error
        if isinstance(built, PreparationStoppedError):
            store.set("stopped", "")
        store.set(node, pickle.dumps(built).hex())
    elif is_first_of_node():
        wait_until(lambda: store.check([first_node]))
        store.set(node, store.get(first_node).decode())
    wait_until(lambda: store.check([node]))
    result = pickle.loads(bytes.fromhex(store.get(node).decode()))
    stopped = isinstance(result, PreparationStoppedError)
    if isinstance(result, Exception) and not stopped:
        raise result
    store.add("ready", 1)
    wait_until(lambda: store.add("ready", 0) >= dist.get_world_size())
    if store.check(["stopped"]):
        raise result if stopped else PreparationStoppedError("stopped while another node prepared the corpus")
    corpus = open_cache(result, config.data, config.tokenizer)
    check_agreement("the tokens of data.path and data.cache_folder", {"tokens": f"{DIGEST}{corpus.fingerprint}"})
    return corpus


class DataPipeline:
    """Streams of the corpus, and the sequences of the current stage.

    Args:
        config: its order, seed and micro-batches decide which text a step reads.
        corpus: as `prepare_corpus` returns it.
        block_tokens: tokens that a stream's shuffling keeps together: the longest sequence.

    Attributes:
        streams: training text by source.
        held_out: held-out text by source, of those that have any.
        samples: sequences of the stage that `start_stage` was called for.
    """

    def __init__(self, config: Config, corpus: PreparedCorpus, block_tokens: int) -> None:
        self.config, self.corpus, sources = config, corpus, corpus.sources.items()
        stream = partial(TokenStream, block_tokens=block_tokens, order=config.data.order)
        self.streams = {name: stream(source.train, seed=config.training.seed) for name, source in sources}
        held_out = {name: source.validation for name, source in sources if source.validation.tokens}
        self.held_out = {name: stream(store, seed=0, shuffle=False) for name, store in held_out.items()}

    def start_stage(self, stage: ResolvedStage, progress: Progress) -> None:
        """Read this stage's sequences from now on.

        Args:
            progress: says how much of each source earlier stages read, and how many steps of text recovery skipped.
                The stage reads that many steps more.
        """
        sequences = stage.global_batch_tokens // stage.seq_len
        data, seed = self.stage_data(stage), self.config.training.seed
        first_tokens, skipped_steps = progress.source_tokens, progress.skipped_steps(stage.index)
        steps = max(stage.steps, progress.stage_step)  # the config may have shortened the stage since then
        self.samples = StageSamples(
            self.streams, stage.seq_len, data, seed, stage.index, sequences, first_tokens, steps, skipped_steps
        )

    def check_epochs(self, stages: Sequence[ResolvedStage], progress: Progress) -> None:
        """Refuse stages for which data.max_epochs leaves too little text, up to one that a gate may end earlier.

        Raises:
            DataError: naming the first of them.
        """
        for stage in stages[progress.stage :] if self.config.data.max_epochs else ():
            trained = progress.stage_done or progress.stage_step >= stage.steps
            read = progress.read_tokens if trained else {}  # holds even if the config has changed the stage since then
            if not read:
                self.start_stage(stage, progress)
                read = self.samples.tokens_after(stage.steps + progress.skipped_steps(stage.index))
            tokens = progress.source_tokens | read
            progress = replace(progress, stage_step=0, stage_done=False, source_tokens=tokens, read_tokens={})
            if stage.until:
                return

    def stage_data(self, stage: ResolvedStage) -> ResolvedStageData:
        """The stage's data settings. Without a mixture, sources are weighted by their tokens."""
        by_tokens = {name: float(stream.store.tokens) for name, stream in self.streams.items()}
        return replace(stage.data, mixture=stage.data.mixture or by_tokens)

    def steps(
        self, first: int, count: int, batch_layout: BatchLayout, *, pin: bool
    ) -> Iterator[tuple[MicroBatch, ...]]:
        """This rank's micro-batches of `count` steps of the stage from `first` on, read ahead."""
        workers = self.config.data.workers
        return read_steps(self.samples, first, count, batch_layout, workers=workers, read_ahead=READ_AHEAD, pin=pin)

    def filler(self, number: int, count: int) -> np.ndarray:
        """Held-out tokens, `[count]` int64; another number gives other tokens until the text is used up.

        They come from the largest source of plain text, or of conversations if there is no plain text.
        """
        sources = self.config.data.by_name()
        plain = {name: stream for name, stream in self.held_out.items() if not sources[name].conversations}
        streams = (plain or self.held_out).values()
        return max(streams, key=lambda stream: stream.store.tokens).read(number * count, count)

    def describe_stage(self, stage: ResolvedStage) -> str:
        """Notes on the stage's text for the log, each after a semicolon; empty if there is nothing to note."""
        data, notes, mixture = stage.data, [], self.samples.data.mixture
        if len(self.streams) > 1:
            total = sum(mixture.values())
            notes.append("mixture " + ", ".join(f"{name} {weight / total:.0%}" for name, weight in mixture.items()))
        for name, step in self.samples.last_steps().items():
            if step <= stage.steps:
                when = f"reaches max_epochs in step {step} of" if step else "reached max_epochs before"
                notes.append(f"{name} {when} the stage; the other sources take its share")
        if data.packing != "concat":
            largest = max(self.samples.packed.values(), key=lambda packed: packed.samples)
            whole = largest.whole_fraction(0)
            notes.append(f"packed by {data.packing}, {whole:.0%} of the first window's documents whole")
        for name, packed in self.samples.packed.items():
            if packed.stream.store.has_masks:
                notes.append(f"{name}: {packed.cuts()}")
        notes += ["documents masked"] * data.document_mask
        notes += ["positions restart in each document"] * data.restart_positions
        short = f"{data.short_share:.0%} of the sequences cut to {data.short_seq_len:,} tokens"
        growth = f"attention grows from {data.growth_from:,} tokens over {data.growth_steps} steps"
        notes += [short] * (data.short_share > 0) + [growth] * (data.growth_from > 0)
        return "".join("; " + note for note in notes)

    def describe_epochs(self, steps: int) -> str:
        """How often the run has read each source after this many steps of the stage."""
        read = self.samples.tokens_after(steps)
        used_up = {name for name, step in self.samples.last_steps().items() if step <= steps}
        return "read so far: " + ", ".join(
            f"{name} {read.get(name, 0) / stream.store.tokens:.2f} times" + " (its max_epochs)" * (name in used_up)
            for name, stream in self.streams.items()
        )
