"""Tokens a second and MFU of training steps on one device: `python -m benchmarks.training_speed`.

A step is forward, chunked loss and backward of one sequence and no optimizer, on one rank, for each length, activation
mode, and compiled or not. What does not fit is said so. FLOPs count causal attention once and no recomputation.
"""

import argparse
import dataclasses
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.llama import FLAVORS, SHARDING, Llama, LlamaShape
from torchtitan_cp.attention import attend, make_plan
from torchtitan_cp.config import Config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.metrics import find_peak, flops_per_token
from torchtitan_cp.optimizer import chunked_cross_entropy
from torchtitan_cp.parallel import Meshes, parallelize
from torchtitan_cp.parallel.device import Device, find_device

CHUNK = 2048


def step_seconds(shape: LlamaShape, seq_len: int, config: Config, device: Device, rounds: int) -> tuple[float, int]:
    """(seconds of the fastest step, peak bytes); raises torch.OutOfMemoryError where it does not fit."""
    with torch.device("meta"):
        model = Llama(shape, lambda q, k, v, plan, window: attend(q, k, v, plan))
    parallelize(model, Meshes(device.device.type, Degrees(1, 1, 1, 1, 1)), SHARDING, config)
    half = shape.head_dim // 2
    model.set_rope([500000.0 ** (-number / half) for number in range(half)], 1.0, device.device)
    plan = make_plan(seq_len)
    tokens, labels = (torch.randint(shape.vocab_size, (1, seq_len), device=device.device) for _ in range(2))
    positions = plan.positions.to(device.device)

    def head(hidden: Tensor, output: nn.Linear) -> Tensor:
        return chunked_cross_entropy(hidden, output.weight, labels, CHUNK)[0]

    best = float("inf")
    device.reset_peak_memory()
    for _ in range(rounds + 1):
        model.zero_grad(set_to_none=True)
        begun = time.perf_counter()
        loss = model(tokens, positions, plan, head) / seq_len
        loss.backward()
        loss.item()
        if device.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best, device.peak_memory_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavor", default="1B", choices=list(FLAVORS))
    parser.add_argument("--layers", type=int, default=0, help="a slice of so many layers; 0: all")
    parser.add_argument("--vocabulary", type=int, default=0, help="0: the flavor's")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072, 262144])
    parser.add_argument("--modes", nargs="+", default=["none", "selective", "attention_saved", "full"])
    parser.add_argument("--tiles", type=int, default=1, help="of the MLP")
    parser.add_argument("--compile", type=int, nargs="+", default=[0, 1], help="1: compiled blocks")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()

    device = find_device()
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group(device.backend, store=store, rank=0, world_size=1)
    shape = FLAVORS[options.flavor]
    shape = dataclasses.replace(
        shape, n_layers=options.layers or shape.n_layers, vocab_size=options.vocabulary or shape.vocab_size
    )
    peak = find_peak(device.device, device.name, getattr(torch, options.dtype), 0.0)
    print(f"torch {torch.__version__}, {device.name}, cuDNN {torch.backends.cudnn.version()}, {options.dtype};")
    print(f"{options.flavor}, {shape.n_layers} layers, V {shape.vocab_size}; peak {peak.flops_per_second / 1e12:.4g}")
    print(f"TFLOP/s: {peak.source}\n\n| length | activations | compiled | ms | tokens/s | MFU | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    base, rows = Config(), []
    for length in options.lengths:
        for mode in options.modes:
            for compiled in options.compile:
                config = dataclasses.replace(
                    base,
                    training=dataclasses.replace(base.training, compute_dtype=options.dtype),
                    activation=dataclasses.replace(base.activation, checkpoint=mode, mlp_tiles=options.tiles),
                    compile=dataclasses.replace(base.compile, enable=bool(compiled)),
                )
                row: dict[str, Any] = {"length": length, "mode": mode, "compiled": bool(compiled)}
                try:
                    seconds, memory = step_seconds(shape, length, config, device, options.rounds)
                except torch.OutOfMemoryError:
                    print(f"| {length} | {mode} | {compiled} | does not fit | | | |", flush=True)
                    rows.append(row | {"fits": False})
                    continue
                finally:
                    gc.collect()
                    if device.device.type == "cuda":
                        torch.cuda.empty_cache()
                flops = flops_per_token(
                    shape.linear_parameters(), shape.layer_windows, shape.n_heads, shape.head_dim, length
                )
                mfu = length / seconds * flops / peak.flops_per_second
                rows.append(row | {"fits": True, "seconds": seconds, "mfu": mfu, "peak_bytes": memory})
                print(
                    f"| {length} | {mode} | {compiled} | {seconds * 1e3:,.0f} | {length / seconds:,.0f} | {mfu:.1%} | "
                    f"{memory / 2**30:.1f} |",
                    flush=True,
                )
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
