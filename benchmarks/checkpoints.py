"""How long training stands still for a checkpoint, and how long one takes to load.

A Llama of each width with AdamW's moments, in fp32, sharded over the ranks by FSDP. Saves that are written at once and
saves from a copy in host memory come in turn. Loading is told apart into verifying, which reads every file for its
checksum, each rank a share, and filling the model.
"""

import shutil
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
from models.llama import SHARDING, Llama, LlamaShape
from torchtitan_cp.attention import attend
from torchtitan_cp.checkpoint import Checkpoints, Progress
from torchtitan_cp.config import Config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.config.sections import Checkpoint
from torchtitan_cp.parallel import Meshes, parallelize

HEAD_DIM = 64


def make_state(dim: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """On a rank: a model of this width with moments."""
    shape = LlamaShape(dim, 8, dim // HEAD_DIM, dim // HEAD_DIM, HEAD_DIM, 3 * dim, vocab_size=16384)
    with torch.device("meta"):
        model = Llama(shape, lambda q, k, v, plan, window: attend(q, k, v, plan))
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
    # Set aside by the first save of each, which is not counted.
    kinds = {
        name: Checkpoints(folder / name, Checkpoint(asynchronous=name == "asynchronous", keep=1))
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
        checkpoints = Checkpoints(folder)
        dist.barrier()
        begun = time.perf_counter()
        saved = checkpoints.read_progress()
        verified = time.perf_counter()
        assert saved is not None
        checkpoints.load(saved[0], [model], [optimizer])
        dist.barrier()
        return verified - begun, time.perf_counter() - verified

    return run


def measure_width(dim: int, folder: Path, world_sizes: list[int], rounds: int) -> Row:
    """Medians over rounds of the slowest rank."""
    with start_ranks(2) as ranks:
        ranks.make(saves, dim, folder)
        answers = [ranks.answer() for _ in range(rounds)]

    def median(kind: str, which: int) -> float:
        return statistics.median(max(rank[kind][which] for rank in answer) for answer in answers)

    [newest] = (folder / "synchronous").glob("step-*")
    row: Row = {
        "parameters": answers[0][0]["parameters"],
        "bytes": sum(path.stat().st_size for path in newest.iterdir()),
        "synchronous_s": median("synchronous", 0),
        "asynchronous_s": median("asynchronous", 0),
        "on_disk_s": median("asynchronous", 1),
    }
    row["ratio"] = row["asynchronous_s"] / row["synchronous_s"]
    for size in world_sizes:
        with start_ranks(size) as ranks:
            ranks.make(loads, dim, folder / "synchronous")
            times = [max(ranks.answer()) for _ in range(rounds)]
        for part, name in enumerate(("verify", "fill")):
            row[f"{name}_s_on_{size}"] = statistics.median(time[part] for time in times)
    return row


def measure(widths: list[int], ranks: list[int], rounds: int, folder: str) -> Iterator[Row]:
    """ranks: that load what two have saved; folder: where checkpoints are written, empty for the system's."""
    base = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=folder or None))
    try:
        for dim in widths:
            yield measure_width(dim, base / str(dim), ranks, rounds)
            shutil.rmtree(base / str(dim))
    finally:
        shutil.rmtree(base, ignore_errors=True)


BENCHMARK = Benchmark(
    measure,
    {"widths": [256, 512, 1024], "ranks": [1, 2, 4], "rounds": 5, "folder": ""},
    {"widths": [128], "ranks": [1, 2], "rounds": 2},
)
