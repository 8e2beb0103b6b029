"""Whole training steps by length, this trainer beside a plain Hugging Face loop."""

import importlib
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.benchmark import Benchmark, Row
from benchmarks.ranks import Run, start_ranks
from models import ARCHITECTURES
from models.llama import FLAVORS
from torchtitan_cp.config import load_config
from torchtitan_cp.parallel import start_ranks as join_ranks
from torchtitan_cp.parallel.device import find_device
from torchtitan_cp.registry import register
from torchtitan_cp.trainer import Trainer

CORES, VOCABULARY, STEP_TOKENS, PATIENCE_SECONDS = 2, 4096, 8192, 600.0

CONFIG = """
[job]
dump_folder = "{folder}"
[model]
flavor = "debug"
overrides = {{vocab_size = {vocabulary}}}
[tokenizer]
kind = "bytes"
[data]
source = "python-stdlib"
document = "folder"
cache_folder = "{cache}"
validation_fraction = 0.0
[training]
compute_dtype = "float32"
micro_batch_sequences = {sequences}
[checkpoint]
enable = false
[[curriculum.stages]]
seq_len = {length}
steps = {steps}
global_batch_tokens = {tokens}
cp = {cp}
strategy = "{strategy}"
[compile]
enable = {compiled}
"""


def ours(length: int, steps: int, cache: str, strategy: str, compiled: bool = False) -> Run:
    """This trainer with all that it does beside a step; ranks read different sequences where there are enough."""
    ranks, tokens = dist.get_world_size(), max(length, STEP_TOKENS)
    cp = 1 if tokens // length >= ranks else ranks
    sequences = max(1, tokens // length * cp // ranks)
    register(ARCHITECTURES)

    def run() -> tuple[list[float], int]:
        paths: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(paths)
        folder = Path(paths[0])
        values = {"length": length, "steps": steps, "cache": cache, "strategy": strategy, "cp": cp, "tokens": tokens}
        values |= {"vocabulary": VOCABULARY, "sequences": sequences, "compiled": str(compiled).lower()}
        text = CONFIG.format(folder=folder / "run", **values)
        (folder / f"{dist.get_rank()}.toml").write_text(text)
        before = reset_peak()
        Trainer(load_config(folder / f"{dist.get_rank()}.toml"), join_ranks(PATIENCE_SECONDS)).run()
        peak = find_device().peak_memory_bytes() - before
        dist.barrier()
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
        return [line["step_seconds"] for line in lines], peak

    return run


def hugging_face(length: int, steps: int, cache: str, strategy: str, compiled: bool = False) -> Run:
    """The loop of its documentation around LlamaForCausalLM: SDPA, its own loss, AdamW, clipped gradients."""
    library: Any = importlib.import_module("transformers")
    size = FLAVORS["debug"]
    settings = library.LlamaConfig(
        hidden_size=size.dim,
        num_hidden_layers=size.n_layers,
        num_attention_heads=size.n_heads,
        num_key_value_heads=size.n_kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.ffn_dim,
        vocab_size=VOCABULARY,
        tie_word_embeddings=size.tie_embeddings,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        use_cache=False,
    )

    def run() -> tuple[list[float], int]:
        before = reset_peak()
        model = library.LlamaForCausalLM(settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        run_model: Any = torch.compile(model) if compiled else model
        times = []
        for _ in range(steps):
            begun = time.perf_counter()
            ids = torch.randint(VOCABULARY, (max(1, STEP_TOKENS // length), length))
            run_model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.append(time.perf_counter() - begun)
        return times, find_device().peak_memory_bytes() - before

    return run


def reset_peak() -> int:
    """Count peak memory from here; what is resident now, in bytes."""
    device = find_device()
    device.reset_peak_memory()
    return device.peak_memory_bytes()


# name -> (what runs, ranks, threads of each)
CONTENDERS: dict[str, tuple[Callable[..., Run], int, int]] = {
    "torchtitan_cp, 2 ranks": (ours, CORES, 1),
    "torchtitan_cp, 2 ranks, compiled": (partial(ours, compiled=True), CORES, 1),
    "torchtitan_cp, 1 rank": (ours, 1, CORES),
    "torchtitan_cp, 1 rank, compiled": (partial(ours, compiled=True), 1, CORES),
    "Hugging Face loop, compiled": (partial(hugging_face, compiled=True), 1, CORES),
    "Hugging Face loop": (hugging_face, 1, CORES),
}


def measure(
    lengths: list[int], contenders: list[str], strategy: str, steps: int, rounds: int, cache: str
) -> Iterator[Row]:
    """The quickstart's model, fp32, the same tokens a step, on two cores; the contenders in turn, rounds times.

    steps: of a round, of which the first is not counted; peak_mib: of all processes, beyond what they held before.
    """
    with ExitStack() as stack:
        groups = {name: stack.enter_context(start_ranks(*CONTENDERS[name][1:])) for name in contenders}
        for length in lengths:
            for name, group in groups.items():
                group.make(CONTENDERS[name][0], length, steps, cache, strategy)
            times: dict[str, list[float]] = {name: [] for name in contenders}
            peaks: dict[str, float] = {}
            for _, (name, group) in itertools.product(range(rounds), groups.items()):
                answers = group.answer()
                times[name] += answers[0][0][1:]
                peaks[name] = sum(peak for _, peak in answers) / 2**20
            last = statistics.median(times[contenders[-1]])
            for name in contenders:
                median = statistics.median(times[name])
                speed = max(length, STEP_TOKENS) / median
                row = {"length": length, "loop": name, "tokens_per_second": speed, "over_last": last / median}
                yield row | {
                    "over_last_of_fastest": min(times[contenders[-1]]) / min(times[name]),
                    "peak_mib": peaks[name],
                }


BENCHMARK = Benchmark(
    measure,
    {
        "lengths": [1024, 4096, 16384, 32768],
        "contenders": list(CONTENDERS),
        "strategy": "auto",
        "steps": 4,
        "rounds": 3,
        "cache": "outputs/cache",
    },
    {
        "lengths": [1024],
        "contenders": [name for name in CONTENDERS if "compiled" not in name],
        "steps": 2,
        "rounds": 1,
    },
    {"contenders": list(CONTENDERS)},
)
