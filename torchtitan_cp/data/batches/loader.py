"""From a stage's sequences to the micro-batches of one rank, read ahead of the training loop.

Ranks are integers here. The number of a step decides its sequences, their work and the data-parallel rank decide which
of them a rank reads, and the plan for their documents decides which tokens of these it holds.
"""

import errno
import gc
import hashlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, parent_process, resource_tracker, set_forkserver_preload
from multiprocessing.util import Finalize, get_temp_dir
from typing import Any, Protocol

import numpy as np
import torch
import torchdata.nodes as nodes
from torch import Tensor
from torch.utils.data import DataLoader

from torchtitan_cp.attention import AttentionMask, Plan, prepare_plan
from torchtitan_cp.data.batches.samples import PackedSequence
from torchtitan_cp.data.errors import DataError

START_METHOD = "forkserver"  # a fork of a process with threads may hang
# Slow imports of a rank: the server imports them once, and its workers share the memory. This package is not among
# them, as the server's search path may find another version of it.
PRELOADED = [f"torch.{name}" for name in ("distributed.checkpoint", "distributed.fsdp", "distributed.pipelining")]
PRELOADED += ["torch.utils.tensorboard", "torchdata.nodes"]
SHARED_MEMORY = "/dev/shm"
# The longest path of a socket that Linux takes, and what multiprocessing adds to the temporary folder to name one.
SOCKET_BYTES, SOCKET_NAME = 107, "/pymp-12345678/listener-12345678"
SHORT_FOLDERS = ("/tmp", "/var/tmp", SHARED_MEMORY)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # a scheduler sends them; ranks answer them


class Samples(Protocol):
    """Where sequences come from: StageSamples."""

    def sequence(self, number: int) -> PackedSequence: ...

    def document_lengths(self, number: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class BatchLayout:
    """How one optimizer step is divided into micro-batches and ranks, and which share is this rank's.

    Attributes:
        seq_len: S.
        micro_batches: forwards of one step on one rank.
        micro_batch_sequences: B, sequences of one forward on one rank.
        dp: data-parallel ranks.
        dp_rank: index of this rank among them.
        make_plan: (S, mask=, like=) -> this rank's plan; can be pickled.
        windows: attention windows of the model's layers, in keys; 0: no window.
        weighted: micro-batches contain the weights of their tokens.
    """

    seq_len: int
    micro_batches: int
    micro_batch_sequences: int
    dp: int
    dp_rank: int
    make_plan: Callable[..., Plan]
    windows: tuple[int, ...] = (0,)
    weighted: bool = False

    @property
    def sequences(self) -> int:
        """Sequences of a step over all ranks."""
        return self.micro_batches * self.micro_batch_sequences * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.seq_len * self.sequences

    def plans(self, mask: AttentionMask | None = None) -> dict[int, Plan]:
        """The plan for each window, and without one (0), all on one layout."""
        mask = mask or AttentionMask()
        plan = self.make_plan(self.seq_len, mask=mask)
        # A window as long as the sequence hides nothing, and kernels without windows are faster.
        plans = dict.fromkeys({0, *self.windows}, plan)
        for window in plans:
            if 0 < window < self.seq_len:
                plans[window] = self.make_plan(self.seq_len, mask=mask.windowed(window), like=plan)
        return plans


@dataclass(frozen=True)
class MicroBatch:
    """One forward of one rank.

    Attributes:
        tokens: `[B, S/cp]` int64.
        labels: `[B, S/cp]` int64, the next token of each; IGNORED where there is none.
        positions: `[S/cp]` int64, or `[B, S/cp]` where rows differ.
        plans: attention plans by the layers' window; 0: no window.
        numbers: of its sequences in the stage.
        sources: name of each sequence's source.
        document_positions: `[B, S/cp]` int64, how many tokens of its own document precede each.
        weights: `[B, S/cp]` fp32, of each token among those of its document; see PackedSequence.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    plans: dict[int, Plan]
    numbers: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    document_positions: Tensor | None = None
    weights: Tensor | None = None

    @property
    def plan(self) -> Plan:
        """The plan of layers without a window."""
        return self.plans[0]

    def pin_memory(self) -> "MicroBatch":
        """A copy with its tensors in pinned memory.

        torch's loader calls this method, in a thread of the training process, which is where plans are prepared.
        """
        for plan in self.plans.values():
            prepare_plan(plan)
        fetched: dict[str, Any] = {name: x.pin_memory() for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **fetched)


def batch_facts(batch_layout: BatchLayout, micro_batches: Sequence[MicroBatch]) -> dict[str, Any]:
    """What ranks must agree on before they exchange the messages of a step, by name.

    Data-parallel ranks have different documents, so the names of these contain the rank.
    """
    plan, of = micro_batches[0].plan, f"of the first batch of data-parallel rank {batch_layout.dp_rank}"
    facts = {name: value for name, value in vars(batch_layout).items() if name not in ("dp_rank", "make_plan")}
    facts |= {name: getattr(plan, name) for name in ("strategy", "kernel", "all_to_all_ranks", "kv_transfer", "ranks")}
    plans = [plan for batch in micro_batches for _, plan in sorted(batch.plans.items())]
    for name, values in (
        ("sequences", [batch.numbers for batch in micro_batches]),
        ("documents", [plan.mask for plan in plans]),
        ("layout", [plan.layout for plan in plans]),
    ):
        facts[f"the {name} {of}"] = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
    return facts


def attention_work(document_lengths: Sequence[int]) -> int:
    """The cost of causal attention over packed documents, up to a factor: the sum of squared lengths, in tokens²."""
    return sum(length * length for length in document_lengths)


def balanced_order(work: Sequence[float], dp: int, micro_batches: int) -> np.ndarray:
    """Which sequence each rank runs in each micro-batch of a step.

    Ranks meet in every micro-batch (parameters are gathered, gradients reduced), so the slowest sets its time.
    Sequences of similar work go to the same micro-batch, the heaviest to the first. Within it they are assigned in
    rounds of one to each rank, the heaviest of a round to the rank with the least work so far in this micro-batch,
    then in the step (longest processing time first, Graham 1969, with equal counts).

    In a micro-batch the largest load exceeds the smallest by no more than the sequences of one round differ; summed
    over micro-batches, by no more than the heaviest and the lightest sequence of the step differ. The sequences of the
    step stay the same, and so does its gradient.

    Args:
        work: of each of the step's dp * micro_batches * B sequences, in any unit.
        dp: data-parallel ranks.
        micro_batches: forwards of one step on one rank.

    Returns:
        `[micro_batches, dp, B]` int64, indices into `work`. Equal work gives the same order everywhere.
    """
    assert len(work) % (dp * micro_batches) == 0, "every rank runs as many sequences"
    works = np.asarray(work)
    rounds = np.argsort(-works, kind="stable").reshape(micro_batches, -1, dp)
    assigned = np.empty_like(rounds)
    total = np.zeros(dp, dtype=works.dtype)
    for index, micro_batch in enumerate(rounds):
        load = np.zeros(dp, dtype=works.dtype)
        for number, sequences in enumerate(micro_batch):
            ranks = np.lexsort((total, load))
            assigned[index, number, ranks] = sequences
            load[ranks] += works[sequences]
            total[ranks] += works[sequences]
    return assigned.transpose(0, 2, 1)


def assign_sequences(samples: Samples, step: int, batch_layout: BatchLayout) -> np.ndarray:
    """`[micro_batches, dp, B]` int64: numbers of a step's sequences, assigned by their work."""
    numbers = range(step * batch_layout.sequences, (step + 1) * batch_layout.sequences)
    work = [attention_work(samples.document_lengths(number)) for number in numbers]
    return numbers.start + balanced_order(work, batch_layout.dp, batch_layout.micro_batches)


def read_step(samples: Samples, batch_layout: BatchLayout, step: int) -> tuple[MicroBatch, ...]:
    """This rank's micro-batches of a step in the stage."""
    assigned = assign_sequences(samples, step, batch_layout)[:, batch_layout.dp_rank].tolist()
    return tuple(collate(samples.sequence, batch_layout, numbers) for numbers in assigned)


def collate(read: Callable[[int], PackedSequence], batch_layout: BatchLayout, numbers: list[int]) -> MicroBatch:
    """The micro-batch of these sequences, with the plans for their documents."""
    rows = [read(number) for number in numbers]
    lengths = tuple(row.document_lengths for row in rows)
    whole = all(row == (batch_layout.seq_len,) for row in lengths)
    plans = batch_layout.plans(None if whole else AttentionMask(document_lengths=lengths))
    tokens, labels, positions, within, *weights = (
        plans[0].shard(torch.from_numpy(np.stack([getattr(row, name) for row in rows])), dim=1)
        for name in ("tokens", "labels", "positions", "document_positions", *["weights"] * batch_layout.weighted)
    )
    positions = positions[0] if (positions == positions[0]).all() else positions
    sources = tuple(row.spans[0].source for row in rows)
    return MicroBatch(tokens, labels, positions, plans, tuple(numbers), sources, within, *weights)


def read_steps(
    samples: Samples, first: int, steps: int, batch_layout: BatchLayout, *, workers: int, read_ahead: int, pin: bool
) -> Iterator[tuple[MicroBatch, ...]]:
    """The micro-batches of `steps` steps from `first` on, in order.

    Args:
        workers: processes that read and plan; 0: a thread of this process.
        read_ahead: steps that are kept ready, at least one for each worker.
        pin: copy them to pinned memory, so that a GPU can fetch them while it computes.

    Raises:
        DataError: /dev/shm has no room for what workers read, or there is no folder for the sockets of workers.
        RuntimeError: a worker died; torch names its signal if it can.
    """
    read, numbers = partial(read_step, samples, batch_layout), range(first, first + steps)
    if not workers:
        source: nodes.BaseNode = nodes.Mapper(nodes.IterableWrapper(numbers), read)
        source = nodes.PinMemory(source) if pin else source
        return iter(nodes.Loader(nodes.Prefetcher(source, prefetch_factor=read_ahead)))
    loader: DataLoader[Any] = DataLoader(
        numbers,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=partial(_read_into_shared_memory, read),  # of one number, in a worker
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=-(-read_ahead // workers),
        multiprocessing_context=START_METHOD,
        worker_init_fn=_start_worker,
    )
    return _receive(_start_without_stop_signals(loader))


def _read_into_shared_memory(read: Callable[[int], tuple[MicroBatch, ...]], step: int) -> tuple[MicroBatch, ...]:
    """A step's micro-batches with their tensors in shared memory.

    A worker's queue would share them in a thread, whose errors do not reach the rank.
    """
    micro_batches = read(step)
    for tensor in (value for batch in micro_batches for value in vars(batch).values() if isinstance(value, Tensor)):
        tensor.share_memory_()
    return micro_batches


def _receive(steps: Iterator[Any]) -> Iterator[tuple[MicroBatch, ...]]:
    try:
        yield from map(tuple, steps)  # pinning makes lists
    except RuntimeError as error:
        if "shared memory" in str(error):
            raise _full_shared_memory() from error
        raise
    except (ConnectionError, EOFError) as error:  # tensors are fetched from the worker that made them
        raise RuntimeError("a process of data.workers exited unexpectedly; is the host short of memory?") from error


def _full_shared_memory() -> DataError:
    return DataError(
        f"{SHARED_MEMORY} ({shutil.disk_usage(SHARED_MEMORY).total / 1e6:,.2f} MB) has no room for the batches that "
        "data.workers keep ready",
        fix="enlarge it (docker run --shm-size=8g, or --ipc=host), lower data.prefetch_batches, or set data.workers = 0",
    )


def _start_worker(worker: int) -> None:
    """Exit with the rank, even if it is killed: torch watches a worker's parent, which is the server that forked it.

    Plans are many small objects without cycles, and looking through them all takes a third of a worker's time.
    """
    threading.Thread(target=_end_with_rank, daemon=True).start()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def _end_with_rank() -> None:
    rank = parent_process()
    assert rank
    rank.join()
    os._exit(1)


def _choose_socket_folder() -> None:
    """Let multiprocessing put its sockets where their paths are short enough, if TMPDIR is too long for that.

    Raises:
        DataError: no other temporary folder can be written.
    """
    if len(os.fsencode(tempfile.gettempdir() + SOCKET_NAME)) <= SOCKET_BYTES:
        return
    folder = next((folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), None)
    if not folder:
        raise DataError(
            f"the temporary folder {tempfile.gettempdir()} is too long for the sockets of data.workers, whose paths "
            f"have at most {SOCKET_BYTES} bytes, and none of {', '.join(SHORT_FOLDERS)} can be written",
            fix=f"set TMPDIR to a folder of at most {SOCKET_BYTES - len(SOCKET_NAME)} bytes, or data.workers = 0",
        )
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        get_temp_dir()  # is chosen once for this process and those that it starts
    finally:
        tempfile.tempdir = before


def _start_without_stop_signals(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the loader's workers with the stop signals blocked: a scheduler may signal every process of a job.

    The rank answers those signals, and its workers end with it. A blocked signal stays blocked in the processes that
    this one starts, also in the server that forks the workers. Python sends SIGTERM to workers that are left when it
    exits, and waits for them: these are killed before that.
    """
    others = active_children()
    _choose_socket_folder()
    set_forkserver_preload(PRELOADED)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # where it starts the tracker, it unblocks SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        steps = iter(loader)
    except OSError as error:
        if error.errno == errno.ENOSPC:  # each worker's queues have semaphores there
            raise _full_shared_memory() from error
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for worker in set(active_children()).difference(others):
        Finalize(steps, worker.kill, exitpriority=0)
    return steps
