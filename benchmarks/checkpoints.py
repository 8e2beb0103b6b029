"""How long training stands still for a checkpoint, and how long one takes to load."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.benchmark import Benchmark, Row
from benchmarks.ranks import start_ranks
from models.llama import SHARDING, Llama, LlamaArgs
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.config import Config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.config.run import Checkpoint
from torchtitan_cp.parallel.apply import parallelize
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.training.model import LayerAttention

HEAD_DIM = 64


def make_state(dim: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """On a rank: a model of this width with moments."""
    shape = LlamaArgs(dim, 8, dim // HEAD_DIM, dim // HEAD_DIM, HEAD_DIM, 3 * dim, vocab_size=16384)
    with torch.device("meta"):
        model = Llama(shape, LayerAttention())
    parallelize(model, Meshes("cpu", Degrees(1, 1, dist.get_world_size(), 1, 1)), SHARDING, Config())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saves(dim: int, folder: Path) -> Callable[[], dict[str, Any]]:
    """On a rank: one save of each kind; seconds that training stands still, and until it is on disk."""
    model, optimizer = make_state(dim)
    # The first save of each, which takes the memory, is not counted.
    kinds = {
        name: CheckpointManager(folder / name, Checkpoint(asynchronous=name == "asynchronous", keep=1))
        for name in ("synchronous", "asynchronous")
    }
    step = 0

    def run() -> dict[str, Any]:
        nonlocal step
        step += 1
        found: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
        for name, checkpoints in kinds.items():
            dist.barrier()
            begun = time.perf_counter()
            checkpoints.save(Progress(step=step), [model], [optimizer])
            still = time.perf_counter() - begun
            checkpoints.wait()
            found[name] = still, time.perf_counter() - begun
        return found

    return run


def loads(dim: int, folder: Path) -> Callable[[], tuple[float, float]]:
    """On a rank: seconds to verify the newest checkpoint, and to fill the model from it."""
    model, optimizer = make_state(dim)

    def run() -> tuple[float, float]:
        checkpoints = CheckpointManager(folder)
        dist.barrier()
        begun = time.perf_counter()
        saved = checkpoints.find_newest()
        verified = time.perf_counter()
        assert saved is not None
        checkpoints.load(saved[0], [model], [optimizer])
        dist.barrier()
        return verified - begun, time.perf_counter() - verified

    return run


def measure(widths: list[int], load_ranks: list[int], rounds: int, folder: str) -> Iterator[Row]:
    """A Llama of each width with AdamW's moments, fp32, FSDP over two ranks; medians of the slowest rank.

    Saves that are written at once and saves from a copy in host memory come in turn; the seconds are those that
    training stands still. Loading is verifying every file's checksum, each rank a share, and filling the model.
    folder: where checkpoints are written; empty: the system's.
    """
    for dim in widths:
        with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=folder or None) as name:
            yield _measure(dim, Path(name), load_ranks, rounds)


def _measure(dim: int, folder: Path, load_ranks: list[int], rounds: int) -> Row:
    with start_ranks(2) as ranks:
        ranks.make(saves, dim, folder)
        answers = [ranks.answer() for _ in range(rounds)]

    def median(kind: str, which: int) -> float:
        return statistics.median(max(rank[kind][which] for rank in answer) for answer in answers)

    still, stall = median("synchronous", 0), median("asynchronous", 0)
    [newest] = (folder / "synchronous").glob("step-*")
    row: Row = {
        "parameters": answers[0][0]["parameters"],
        "MB": round(sum(path.stat().st_size for path in newest.iterdir()) / 1e6),
        "synchronous_s": still,
        "asynchronous_s": stall,
        "ratio": stall / still,
        "on_disk_after_s": median("asynchronous", 1),
    }
    for size in load_ranks:
        with start_ranks(size) as ranks:
            ranks.make(loads, dim, folder / "synchronous")
            times = [max(ranks.answer(), key=sum) for _ in range(rounds)]
        for part, what in enumerate(("verify", "fill")):
            row[f"{what}_on_{size}_s"] = statistics.median(time[part] for time in times)
    return row


BENCHMARK = Benchmark(
    measure,
    {"widths": [256, 512, 768], "load_ranks": [1, 2, 4], "rounds": 5, "folder": ""},
    {"widths": [64], "load_ranks": [1, 2], "rounds": 1},
)
