"""Micro-batches read ahead of the training loop, in a thread or in worker processes."""

import errno
import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import active_children, parent_process, resource_tracker, set_forkserver_preload
from multiprocessing.util import Finalize, get_temp_dir

import torchdata.nodes as nodes
from torch import Tensor
from torch.utils.data import DataLoader

from torchtitan_cp.data.batches.micro_batches import BatchLayout, MicroBatch, Samples, read_step
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
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # of a scheduler or a terminal; ranks answer them
READ_AHEAD = 2  # steps: one in use by the device, one waiting


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
    loader: DataLoader[tuple[MicroBatch, ...]] = DataLoader(
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
    try:
        for tensor in (value for batch in micro_batches for value in vars(batch).values() if isinstance(value, Tensor)):
            tensor.share_memory_()
    except RuntimeError as error:
        raise RuntimeError(f"no shared memory: {error}") from error
    return micro_batches


def _receive(steps: Iterator[Sequence[MicroBatch]]) -> Iterator[tuple[MicroBatch, ...]]:
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
        fix="enlarge it (docker run --shm-size=8g or --ipc=host), lower data.prefetch_batches, or set data.workers = 0",
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


def _start_without_stop_signals(loader: DataLoader[tuple[MicroBatch, ...]]) -> Iterator[tuple[MicroBatch, ...]]:
    """Start the loader's workers with the stop signals blocked: a scheduler or terminal signals every process of a job.

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
