"""A pool of ranks that outlives a test: started once for each size, and given functions to run.

The ranks are on gloo and see no GPU. With TEST_DEVICE=cuda in the environment and a GPU for each they are on NCCL,
where the conformance and parity suites run too; with SHARE_GPU=1 as well they may take turns on fewer.
"""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map_only

from torchtitan_cp.parallel import mesh
from torchtitan_cp.runtime.gloo import use_one_thread

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["tests.support.imported"])
MAX_GROUPS = 12  # torch keeps meshes, so groups are never given up


def backend_of(size: int) -> str:
    """What a pool of `size` ranks runs on."""
    gpus = torch.cuda.device_count() if os.environ.get("TEST_DEVICE") == "cuda" else 0
    return "nccl" if gpus >= size or (gpus and os.environ.get("SHARE_GPU") == "1") else "gloo"


def rank_device() -> torch.device:
    """Where this rank's tensors have to be; the CPU outside of a pool."""
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


class RankFailure(AssertionError):
    """A function raised on a rank; the text is that rank's traceback."""


class RankPool:
    """`size` processes in one group, one thread each.

    Args:
        size: number of ranks.

    What ranks on GPUs return comes back on the CPU. On gloo they are held still between calls, as a group has a thread
    that wakes a hundred times a second.
    """

    def __init__(self, size: int) -> None:
        self.size, self.groups = size, 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any, timeout: float = 400.0) -> list[Any]:
        """Run a module-level function on every rank at once.

        Args:
            timeout: seconds after which the ranks are killed.

        Returns:
            what each rank returned, in rank order.

        Raises:
            RankFailure: with the traceback of the first rank that failed; the pool then starts anew.
        """
        if not self.processes:
            self._start()
        self._signal(signal.SIGCONT)
        call = pickle.dumps((function, arguments))
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(call)
            except BrokenPipeError:
                raise self._death_of(rank, "between two calls") from None
        results: dict[int, Any] = {}
        while len(results) < self.size:
            ready = wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in results], timeout)
            if not ready:
                missing = [rank for rank in range(self.size) if rank not in results]
                self.stop()
                raise RankFailure(f"ranks {missing} of {self.size} did not finish within {timeout:g} s")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                results[rank] = self._receive(rank)
        self._signal(signal.SIGSTOP)
        if self.groups > MAX_GROUPS:
            self.stop()
        return [results[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> Any:
        try:
            failed, value, self.groups = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._death_of(rank, "in this call") from None
        if failed:
            self.stop()
            raise RankFailure(f"rank {rank} of {self.size}:\n{value}")
        return value

    def _death_of(self, rank: int, when: str) -> RankFailure:
        """The failure of a rank whose process ended; the pool then starts anew."""
        self.processes[rank].join(10)
        code = self.processes[rank].exitcode
        self.stop()
        return RankFailure(f"rank {rank} of {self.size} died {when} with exit code {code}; stacks are on stderr")

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store, backend = f"{self.folder.name}/store", backend_of(self.size)
        # What the fork server imports asks CUDA for its devices, after which no fork of it may use them.
        context = FORK if backend == "gloo" else multiprocessing.get_context("spawn")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, backend, store, there), daemon=True)  # type: ignore[attr-defined]
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def _signal(self, number: signal.Signals) -> None:
        if backend_of(self.size) == "gloo":
            for process in self.processes:
                with suppress(ProcessLookupError):  # it died, which its pipe tells
                    os.kill(process.pid, number)

    def stop(self) -> None:
        """End the ranks; the next call starts new ones."""
        for process in self.processes:
            process.kill()
            process.join()
        if self.processes:
            self.folder.cleanup()
        self.processes, self.pipes, self.groups = [], [], 0


def _serve(rank: int, size: int, backend: str, store: str, pipe: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    trainer = importlib.import_module("torchtitan_cp.training.trainer")
    trainer.freeze_long_lived_objects = lambda: None  # type: ignore[attr-defined]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    use_one_thread()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else None
    if device:
        torch.cuda.set_device(device)
        if torch.cuda.device_count() < size:  # NCCL lets ranks share a GPU that it takes for nodes of their own
            os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    place = {"rank": rank, "world_size": size, "device_id": device}
    dist.init_process_group(backend, store=dist.FileStore(store, size), **place)  # type: ignore[arg-type]
    mesh.DeviceMesh = _made_once(mesh.DeviceMesh)  # type: ignore[misc, assignment]
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            value = function(*arguments)
            answer = (False, tree_map_only(torch.Tensor, torch.Tensor.cpu, value) if device else value)
        except BaseException:
            answer = (True, traceback.format_exc())
        pipe.send_bytes(pickle.dumps((*answer, len(distributed_c10d._world.pg_map))))


def _made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`DeviceMesh`, with which runs of the same degrees share their groups."""
    made: dict[str, Any] = {}

    def once(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, options))  # before the call, which empties the overrides
        if key not in made:
            made[key] = make(*arguments, **options)
        return made[key]

    return once
