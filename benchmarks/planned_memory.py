"""The planner's memory beside a walk of the trainer's own step on an H100 that is not there, over the options.

Layers have the shape of a released model's, and are fewer, on eight ranks. Of pipeline ranks the larger counts.
"""

import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.benchmark import ROOT, Benchmark, Row
from models import ARCHITECTURES
from torchtitan_cp.config import load_config
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resolve import resolve_run

DEVICE, RANKS, GIB = "h100-80g", 8, 2**30
CONFIG = """
[tokenizer]
kind = "bytes"

[training]
compute_dtype = "bfloat16"
loss_chunk_tokens = 4096

[compile]
enable = false

[lr_scheduler]
warmup_steps = 0

[[curriculum.stages]]
seq_len = 65536
steps = 1
global_batch_tokens = 524288
"""
# Llama 3 8B with a fourth of its vocabulary, Llama 3.2 1B, and Qwen3-30B-A3B with a fourth of its experts.
MODELS = {
    "8B": (
        "llama",
        "{vocab_size = 32064, dim = 4096, n_layers = 4, n_heads = 32, n_kv_heads = 8, head_dim = 128, ffn_dim = 14336}",
    ),
    "1B": (
        "llama",
        "{vocab_size = 128256, dim = 2048, n_layers = 6, n_heads = 32, n_kv_heads = 8, head_dim = 64, "
        "ffn_dim = 8192, tie_embeddings = true}",
    ),
    "experts": (
        "moe",
        "{vocab_size = 32064, dim = 2048, n_layers = 4, n_heads = 32, n_kv_heads = 4, head_dim = 128, "
        "ffn_dim = 768, n_experts = 32, experts_per_token = 4, qk_norm = true}",
    ),
}
STAGE = "--curriculum.stages[0]"
TWO_STEPS = (f"{STAGE}.global_batch_tokens=1048576",)
OPTIONS: dict[str, tuple[str, ...]] = {
    **{mode: (f"--activation.checkpoint={mode}",) for mode in ("none", "selective", "attention_saved", "full")},
    "8 tiles": ("--activation.mlp_tiles=8",),
    "offload": ("--activation.offload=true",),
    "state on host": ("--optimizer.offload_state=true",),
    "weights on host": ("--parallel.fsdp_cpu_offload=true",),
    "8bit": ("--optimizer.state=8bit",),
    "muon": ("--optimizer.name=muon",),
    "chunks of 1024": ("--training.loss_chunk_tokens=1024",),
    "one chunk": ("--training.loss_chunk_tokens=65536",),
    "cp 4": ("--parallel.cp=4", f"{STAGE}.seq_len=262144"),
    "cp 2": ("--parallel.cp=2",),
    **{name: (f"--context_parallel.strategy={name}",) for name in ("ring", "all_gather", "all_to_all")},
    "hybrid": ("--context_parallel.strategy=hybrid", "--context_parallel.all_to_all_ranks=2"),
    "tp 2": ("--parallel.tp=2",),
    "tp 4": ("--parallel.tp=4",),
    "pp 2": ("--parallel.pp=2", *TWO_STEPS),
    "interleaved": ("--parallel.pp_schedule=interleaved_1f1b",),
    "ep 8": ("--parallel.ep=8",),
    "2 micro-batches": TWO_STEPS,
    "2 sequences": ("--training.micro_batch_sequences=2", *TWO_STEPS),
    "never resharded": ("--parallel.fsdp_reshard=never",),
    "2 replicas": ("--parallel.dp_replicate=2",),
    "bf16 sums": ("--training.reduce_dtype=bfloat16",),
    "fp32": ("--training.compute_dtype=float32",),
    "float8": ("--training.float8=rowwise",),
    "compiled": ("--compile.enable=true",),  # the dry run takes operators, and halves of blocks as they are compiled
}
MODES = ("none", "selective", "attention_saved", "full")
# For each model its rows; options are separated by commas.
ROWS: dict[str, tuple[str, ...]] = {
    "8B": (
        *(f"{mode}{more}" for mode in MODES for more in ("", ", 8 tiles", ", offload", ", 8 tiles, offload")),
        *(f"full, 8 tiles, {state}" for state in ("state on host", "weights on host", "8bit", "muon")),
        *(f"none, {state}" for state in ("state on host", "weights on host")),
        "attention_saved, 8 tiles, offload, weights on host",
        *(f"{mode}, cp 4, {name}" for mode in ("none", "selective", "attention_saved, 8 tiles")
          for name in ("ring", "all_gather", "all_to_all", "hybrid")),
        "attention_saved, 8 tiles, offload, cp 4, all_to_all",
        *(f"{mode}, tp 4" for mode in MODES), "full, 8 tiles, tp 4", "attention_saved, 8 tiles, tp 2, cp 2",
        *(f"{mode}, pp 2" for mode in MODES), "full, 8 tiles, offload, pp 2",
        "full, pp 2, interleaved", "full, pp 2, tp 2",
        *(f"full, 8 tiles, {chunk}" for chunk in ("chunks of 1024", "one chunk")),
        *(f"full, {more}" for more in ("2 micro-batches", "2 sequences", "never resharded", "2 replicas", "bf16 sums",
                                       "fp32", "compiled")),
        "none, compiled", "none, float8", "full, 8 tiles, float8",
    ),
    "1B": (
        *(f"{mode}{more}" for mode in MODES for more in ("", ", 8 tiles, offload")),
        *(f"full, 8 tiles, {state}" for state in ("state on host", "weights on host", "8bit", "muon")),
        *(f"selective, cp 4, {name}" for name in ("ring", "all_gather", "all_to_all", "hybrid")),
        "selective, tp 2", "full, pp 2", "full, one chunk", "full, chunks of 1024", "full, compiled",
    ),
    "experts": (
        *(f"{mode}{more}" for mode in MODES for more in ("", ", 8 tiles", ", ep 8")),
        "full, ep 8, offload", "full, weights on host", "full, tp 2", "full, 8 tiles, ep 8",
        *(f"{mode}, ep 8, compiled" for mode in MODES[1:]),
    ),
}  # fmt: skip
# The GPU comes first, because with it the program starts again.
PROGRAM = """
from tests.support.fake_cuda import use_fake_cuda
use_fake_cuda("h100-80g")
from benchmarks.planned_memory import compare_all
compare_all()
"""


def compare(path: Path, model: str, options: str) -> Row:
    """Peaks of a row, in GiB, in a process that has a fake GPU."""
    architecture, sizes = MODELS[model]
    overrides = [f"--model.architecture={architecture}", f"--model.overrides={sizes}"]
    config = load_config(path, [*overrides, *(key for option in options.split(", ") for key in OPTIONS[option])])
    (planned,) = plan_config(config, make_cluster(DEVICE, ranks_per_node=RANKS))
    run = resolve_run(config, RANKS, sized_model_args(config))
    begun, peaks = time.process_time(), []
    gpu_walker = importlib.import_module("tests.support.gpu_walker").gpu_walker
    for rank in range(0, RANKS, RANKS // config.parallel.pp):
        with gpu_walker(run, rank) as walk:
            peaks.append(walk(run.stages[0]).peak_bytes / GIB)
    planned_gib = planned.memory.total / GIB
    names = {"model": model, "options": options, "planned_gib": planned_gib, "dry_run_gib": max(peaks)}
    ratio, seconds = planned_gib / max(peaks), time.process_time() - begun
    return names | {"ratio": ratio, "peak_during": planned.memory.phase, "seconds": seconds}


def compare_all() -> None:
    """Read (model, options) pairs as JSON, and print a row for each."""
    register(ARCHITECTURES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(CONFIG)
        for model, options in json.load(sys.stdin):
            print("row:", json.dumps(compare(path, model, options)), flush=True)


def compare_in_process(cases: list[tuple[str, str]]) -> Iterator[Row]:
    """The rows of (model, options), from one process of its own.

    Raises:
        RuntimeError: a dry run failed.
    """
    with tempfile.TemporaryFile("w+") as errors:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, text=True, **pipes)
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(cases))
        process.stdin.close()
        for line in process.stdout:
            if line.startswith("row: "):
                yield json.loads(line.removeprefix("row: "))
        if process.wait():
            errors.seek(0)
            raise RuntimeError(errors.read()[-3000:])


def measure(models: list[str]) -> Iterator[Row]:
    """Peak of a step on eight ranks, 65,536 tokens a rank, in bf16; seconds are those of a core for the dry run."""
    yield from compare_in_process([(model, options) for model in models for options in ROWS[model]])


BENCHMARK = Benchmark(measure, {"models": list(MODELS)}, {"models": ["1B"]}, {"models": list(MODELS)})
