"""The planner beside real training steps on this machine: memory and time, by length, ranks and activation mode."""

import ctypes
import itertools
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks.benchmark import Benchmark, Row
from benchmarks.end_to_end import CONFIG, OURS, PATIENCE_SECONDS, reset_peak
from benchmarks.ranks import Run, start_ranks
from benchmarks.training_memory import M_MMAP_THRESHOLD
from models import ARCHITECTURES
from torchtitan_cp.config import load_config
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.estimate import Estimate, plan_config
from torchtitan_cp.planner.measure import measure_accelerator
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.runtime.device import find_device
from torchtitan_cp.runtime.device import start_ranks as join_ranks
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.trainer import Trainer

CORES = 2
MODES = {
    "none": [],
    "selective": ["--activation.checkpoint=selective"],
    "attention_saved": ["--activation.checkpoint=attention_saved"],
    "full": ["--activation.checkpoint=full"],
    "full, MLP in 8 tiles": ["--activation.checkpoint=full", "--activation.mlp_tiles=8"],
}
WINDOWS = "--model.overrides={vocab_size = 4096, windows = [1024]}"
SHORT = {"seq_len": 512, "global_batch_tokens": 512, "steps": 1}
WINDOWS_FROM = 16384  # tokens, from which on full attention would take minutes


class Seen(NamedTuple):
    """What a rank saw of its steps, and what the planner says of them; seconds of one step."""

    seconds: float
    planned_seconds: float
    peak_bytes: float
    planned_bytes: float


def train(length: int, steps: int, mode: str, cache: str) -> Run:
    """Trains, and gives a run that answers with what was seen and planned: see `Seen`."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    register(ARCHITECTURES)
    ranks = dist.get_world_size()
    paths: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    folder = Path(paths[0])
    path = folder / f"{dist.get_rank()}.toml"
    sizes = {"length": length, "steps": steps, "cache": cache, "strategy": "ring", "cp": ranks, "tokens": length}
    path.write_text(CONFIG.format(folder=folder / "run", model=OURS, sequences=1, compiled="false", **sizes))
    config = load_config(path, [*MODES[mode], *([WINDOWS] if length >= WINDOWS_FROM else [])])

    def plan() -> Estimate:
        dist.barrier()  # the ranks share what the cores share
        measured = measure_accelerator(config, sized_model_args(config), ranks)
        return plan_config(config, make_cluster("here", ranks_per_node=ranks, measured=measured))[0]

    # What a process that trains holds beside a step's tensors is there after a short step.
    short = [f"--curriculum.stages[0].{key}={value}" for key, value in SHORT.items()]
    Trainer(load_config(path, [f"--job.dump_folder={folder / 'short'}", *short]), join_ranks(PATIENCE_SECONDS)).run()
    before_steps = plan()
    resident = reset_peak()
    Trainer(config, join_ranks(PATIENCE_SECONDS)).run()
    peak = find_device().peak_memory_bytes() - resident
    planned = statistics.mean((before_steps.step_seconds, plan().step_seconds))
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    # The first step meets what later ones find made.
    seconds = statistics.median(json.loads(line)["step_seconds"] for line in lines[1:])
    seen = Seen(seconds, planned, peak, before_steps.memory.total)
    return lambda: seen


def measure(lengths: list[int], ranks: list[int], modes: list[str], steps: int, cache: str) -> Iterator[Row]:
    """The debug model, fp32, one sequence a step, by ring on all cores; windows of 1024 from 16K tokens on.

    The planner takes the rates that each rank measures before and after its steps, of which the first is not counted.
    """
    for count, length, mode in itertools.product(ranks, lengths, modes):
        with start_ranks(count, CORES // count) as group:
            group.make(train, length, steps, mode, cache)
            most = Seen(*(max(values) for values in zip(*group.answer(), strict=True)))
        row = {"ranks": count, "length": length, "activation": mode}
        memory = {"peak_mib": most.peak_bytes / 2**20, "planned_mib": most.planned_bytes / 2**20}
        time = {"step_seconds": most.seconds, "planned_seconds": most.planned_seconds}
        ratios = {"memory": most.planned_bytes / most.peak_bytes, "time": most.planned_seconds / most.seconds}
        yield row | memory | time | {f"planned_over_{name}": ratio for name, ratio in ratios.items()}


BENCHMARK = Benchmark(
    measure,
    {"lengths": [8192, 32768], "ranks": [1, 2], "modes": list(MODES), "steps": 3, "cache": "outputs/cache"},
    {"lengths": [2048], "ranks": [2], "modes": ["none", "full"], "steps": 2},
    {"modes": list(MODES)},
)
