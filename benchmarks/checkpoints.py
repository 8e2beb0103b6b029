"""How long training stands still for a checkpoint, and how long one takes to load: `python -m benchmarks.checkpoints`.

A Llama of each width with AdamW's moments, in fp32, sharded over the ranks by FSDP. Saves that are written at once and
saves from a copy in host memory come in turn. Loading is told apart into verifying, which reads every file for its
checksum, each rank a share, and filling the model.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="that load what two have saved")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: the system's)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder))
    rows = []
    try:
        for dim in options.widths:
            rows.append(measure(dim, base / str(dim), options.ranks, options.rounds))
            shutil.rmtree(base / str(dim))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print("| parameters | bytes | synchronous, s | asynchronous, s | ratio | on disk after, s |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        still, stall = row["synchronous"], row["asynchronous"]
        print(
            f"| {row['parameters'] / 1e6:.1f} M | {row['bytes'] / 1e6:,.0f} MB | {still:.2f} | {stall:.3f} | "
            f"{stall / still:.3f} | {row['on_disk']:.2f} |"
        )
    print("\n| parameters | ranks | verify, s | fill, s |\n|---|---|---|---|")
    for row in rows:
        for ranks, (verify, fill) in row["loads"].items():
            print(f"| {row['parameters'] / 1e6:.1f} M | {ranks} | {verify:.2f} | {fill:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def measure(dim: int, folder: Path, world_sizes: list[int], rounds: int) -> dict[str, Any]:
    """Medians over rounds of the slowest rank."""
    with start_ranks(2) as ranks:
        ranks.make(saves, dim, folder)
        answers = [ranks.answer() for _ in range(rounds)]

    def median(kind: str, which: int) -> float:
        return statistics.median(max(rank[kind][which] for rank in answer) for answer in answers)

    [newest] = (folder / "synchronous").glob("step-*")
    row: dict[str, Any] = {
        "parameters": answers[0][0]["parameters"],
        "bytes": sum(path.stat().st_size for path in newest.iterdir()),
        "synchronous": median("synchronous", 0),
        "asynchronous": median("asynchronous", 0),
        "on_disk": median("asynchronous", 1),
        "loads": {},
    }
    for size in world_sizes:
        with start_ranks(size) as ranks:
            ranks.make(loads, dim, folder / "synchronous")
            times = [max(ranks.answer()) for _ in range(rounds)]
        row["loads"][size] = [statistics.median(time[part] for time in times) for part in (0, 1)]
    return row


if __name__ == "__main__":
    main()
