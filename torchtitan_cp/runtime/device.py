"""A rank's device: its memory, copies, random numbers and process group."""

import ctypes
import gc
import hashlib
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cp.config import ConfigError
from torchtitan_cp.runtime.environment import AGENT_RUN, PLACE
from torchtitan_cp.runtime.gloo import use_one_thread


@dataclass(frozen=True)
class Device:
    """The device a rank computes on, and the backend its collectives use."""

    device: torch.device
    backend: str

    @property
    def name(self) -> str:
        """The product name of a GPU; for a CPU, its threads."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} a rank"

    def peak_memory_bytes(self) -> int:
        """Peak since the last reset: allocated on a GPU, resident in the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = _from_proc("/proc/self/status", "VmHWM")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak

    def reset_peak_memory(self) -> None:
        """Count the peak from now on. On systems other than Linux a CPU's peak is always that of the whole process."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        gc.collect()
        with suppress(OSError, AttributeError):
            # Freed memory that the process still holds would hide the next allocations.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")

    def release_memory(self) -> None:
        """Give back the memory that torch's allocator caches, as NCCL allocates outside of it."""
        if self.device.type == "cuda":
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()

    def allocation_retries(self) -> int:
        """How often the GPU was full until torch gave back its cached memory, which makes a step slow."""
        return torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0) if self.device.type == "cuda" else 0

    def free_memory_bytes(self) -> int:
        """Memory that is still available on the GPU, or on the machine."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        free = _from_proc("/proc/meminfo", "MemAvailable")
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if free is None else free

    def move(self, x: Tensor) -> Tensor:
        """Copy a host tensor to the device, without waiting for it."""
        return x.to(self.device, non_blocking=True)


def _from_proc(path: str, name: str) -> int | None:
    """A value of Linux's process files, in bytes; None on other systems."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None


def find_device(local_rank: int = 0) -> Device:
    """The GPU of this rank if there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return Device(torch.device("cuda", local_rank), "nccl")
    return Device(torch.device("cpu"), "gloo")


@dataclass(frozen=True)
class World:
    """This rank among the ranks of the job; `ranks_per_node` consecutive ranks share a machine."""

    rank: int
    size: int
    device: Device
    ranks_per_node: int = 8


def start_ranks(timeout_seconds: float) -> World:
    """Join the process group that torchrun describes in the environment.

    Args:
        timeout_seconds: a collective that waits longer raises.

    Raises:
        ConfigError: this node has fewer GPUs than ranks, on every rank of it; or no launcher started this process.
    """
    device = find_device(int(os.environ.get("LOCAL_RANK", "0")))
    if device.device.type == "cuda":
        ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if ranks > gpus:
            raise ConfigError(
                f"each rank needs a GPU of its own, and this node has {gpus} for {ranks} ranks",
                fix=f"start {gpus} on it (--nproc {gpus}, or NPROC={gpus}), or use its CPU: CUDA_VISIBLE_DEVICES=''",
            )
        torch.cuda.set_device(device.device)
    use_one_thread()
    if not dist.is_initialized():
        if not os.environ.keys() >= set(PLACE):
            raise ConfigError(
                "no launcher started this process, so it has no rank",
                fix="start it by ./run_train.sh, torchtitan-cp train or torchrun",
            )
        if AGENT_RUN not in os.environ:  # the environment may be of another job
            rank, size, address, port = (os.environ[name] for name in PLACE)
            print(f"rank {rank} of {size}, by the environment: joins the others at {address}:{port}", file=sys.stderr)
        device_id = device.device if device.device.type == "cuda" else None
        dist.init_process_group(device.backend, timeout=timedelta(seconds=timeout_seconds), device_id=device_id)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return World(dist.get_rank(), dist.get_world_size(), device, ranks_per_node)


def use_deterministic_kernels() -> None:
    """Make torch refuse every kernel whose results may differ between runs.

    Attention on CUDA then runs FlashAttention's deterministic backward, matrix products a fixed workspace.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # A pass over every new buffer, of which none is read before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def seed_step(seed: int, stage: int, step: int, coordinate: tuple[int, ...]) -> None:
    """Seed the random numbers of an optimizer step from its place in the run only, whatever ran before it.

    Args:
        seed: training.seed.
        stage: its index in the curriculum; step: of the stage, both from 0.
        coordinate: coordinates of this rank along the mesh axes whose ranks must draw different numbers.
    """
    digest = hashlib.sha256(repr((seed, stage, step, coordinate)).encode()).digest()
    # Before CUDA is initialized, torch.manual_seed takes milliseconds to record its caller.
    generators = torch if torch.cuda.is_initialized() else torch.default_generator
    generators.manual_seed(int.from_bytes(digest[:7], "big"))


def stop_ranks() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def freeze_long_lived_objects() -> None:
    """Exclude live objects from garbage collection, after collecting the garbage among those excluded before.

    Ranks collect at different times, and the others wait: 0.1 to 0.2 s while torch and a model are traversed, and a few
    milliseconds after this call.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
