"""Tokens a second and MFU of training steps on one device.

A step is forward, chunked loss and backward of one sequence, and with --optimizer 1 the optimizer, on one rank, for
each length, activation mode, and compiled or not, beside what the planner says of it with this device's measured rates.
What does not fit is said so. FLOPs count causal attention once and no recomputation.
"""

import dataclasses
import gc
import itertools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.benchmark import Benchmark, Row
from models.llama import FLAVORS, SHARDING, Llama, LlamaArgs
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.curriculum import resolve_stages
from torchtitan_cp.metrics.throughput import find_peak, flops_per_token
from torchtitan_cp.optim.build import build_optimizer
from torchtitan_cp.optim.loss import ChunkedCrossEntropy
from torchtitan_cp.parallel.apply import parallelize
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.estimate import Estimate
from torchtitan_cp.planner.measure import measure_accelerator
from torchtitan_cp.runtime.device import Device, find_device
from torchtitan_cp.training.model import LayerAttention

CHUNK = 2048


def step_seconds(
    shape: LlamaArgs, seq_len: int, config: Config, device: Device, rounds: int, optimize: bool
) -> tuple[float, int]:
    """(seconds of the fastest step, peak bytes); raises torch.OutOfMemoryError where it does not fit.

    Args:
        shape: with one window for all layers.
        optimize: a step includes the optimizer's.
    """
    with torch.device("meta"):
        model = Llama(shape, LayerAttention())
    parallelize(model, Meshes(device.device.type, Degrees(1, 1, 1, 1, 1)), SHARDING, config)
    half = shape.head_dim // 2
    model.set_rope([500000.0 ** (-number / half) for number in range(half)], 1.0, device.device)
    (window,) = shape.windows
    plan = make_plan(seq_len, mask=AttentionMask().windowed(window))
    optimizer = build_optimizer(model, config.optimizer) if optimize else None
    tokens, labels = (torch.randint(shape.vocab_size, (1, seq_len), device=device.device) for _ in range(2))
    positions = plan.positions.to(device.device)

    def head(hidden: Tensor, output: nn.Linear) -> Tensor:
        return ChunkedCrossEntropy(CHUNK)(hidden, output.weight, labels)[0]

    best = float("inf")
    device.reset_peak_memory()
    for _ in range(rounds + 1):
        model.zero_grad(set_to_none=True)
        begun = time.perf_counter()
        loss = model(tokens, positions, {window: plan}, head) / seq_len
        loss.backward()
        loss.item()
        if optimizer:
            optimizer.step()
        if device.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best, device.peak_memory_bytes()


def plan_step(shape: LlamaArgs, seq_len: int, config: Config, optimize: bool) -> tuple[float, float]:
    """(seconds, bytes) that the planner gives such a step, with or without an optimizer."""
    stages = (Stage(seq_len=seq_len, steps=1, global_batch_tokens=seq_len),)
    config = dataclasses.replace(config, curriculum=dataclasses.replace(config.curriculum, stages=stages))
    cluster = make_cluster("here", ranks_per_node=1, measured=measure_accelerator(config, shape, 1))
    (stage,) = resolve_stages(
        config, 1, lambda degrees: dict.fromkeys({0, *(mixer.window for mixer in shape.mixers)}, "ring")
    )
    estimate = Estimate(config, shape, stage, cluster)
    if optimize:
        return estimate.step_seconds, estimate.memory.total
    seconds = estimate.step_seconds - estimate.seconds["optimizer"]
    return seconds, estimate.memory.total - estimate.memory.by_kind["optimizer"]


def measure(
    flavor: str,
    layers: int,
    vocabulary: int,
    lengths: list[int],
    modes: list[str],
    tiles: int,
    compile: list[int],
    dtype: str,
    rounds: int,
    optimizer: int,
    window: int,
) -> Iterator[Row]:
    """The fastest of some steps. layers: a slice of so many, 0 for all; vocabulary: 0 for the flavor's.

    tiles: of the MLP; compile: 1 with compiled blocks; window: of every layer in tokens, 0 for none.
    """
    device = find_device()
    dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1)
    shape = FLAVORS[flavor]
    shape = dataclasses.replace(shape, n_layers=layers or shape.n_layers, vocab_size=vocabulary or shape.vocab_size)
    shape = dataclasses.replace(shape, windows=(window,))
    peak = find_peak(device.device, device.name, getattr(torch, dtype), 0.0).flops_per_second
    base = Config()
    for length, mode, compiled in itertools.product(lengths, modes, compile):
        config = dataclasses.replace(
            base,
            training=dataclasses.replace(base.training, compute_dtype=dtype, loss_chunk_tokens=CHUNK),
            activation=dataclasses.replace(base.activation, checkpoint=mode, mlp_tiles=tiles),
            compile=dataclasses.replace(base.compile, enable=bool(compiled)),
        )
        row: Row = {"length": length, "activations": mode, "compiled": bool(compiled)}
        flops = flops_per_token(shape, length)
        try:
            seconds, memory = step_seconds(shape, length, config, device, rounds, bool(optimizer))
            row |= {"ms": seconds * 1e3, "tokens_per_second": length / seconds}
            row |= {"mfu": length / seconds * flops / peak, "peak_gib": memory / 2**30}
        except torch.OutOfMemoryError:
            row |= {"ms": "does not fit"}
        try:
            planned_seconds, planned_bytes = plan_step(shape, length, config, bool(optimizer))
            row |= {"planned_ms": planned_seconds * 1e3, "planned_gib": planned_bytes / 2**30}
        except ConfigError as error:  # a device that the planner does not know
            row |= {"planned_ms": str(error)}
        gc.collect()
        if device.device.type == "cuda":
            torch.cuda.empty_cache()
        yield row
    dist.destroy_process_group()


CUDA = torch.cuda.is_available()
BENCHMARK = Benchmark(
    measure,
    {
        "flavor": "1B" if CUDA else "debug",
        "layers": 0,
        "vocabulary": 0 if CUDA else 4096,
        "lengths": [8192, 32768, 131072, 262144] if CUDA else [1024, 4096, 16384],
        "modes": ["none", "selective", "attention_saved", "full"],
        "tiles": 1,
        "compile": [0, 1] if CUDA else [0],
        "dtype": "bfloat16" if CUDA else "float32",
        "rounds": 2,
        "optimizer": 0,
        "window": 0,
    },
    {"lengths": [1024], "rounds": 1},
    {"flavor": list(FLAVORS), "dtype": ["bfloat16", "float32"]},
)
