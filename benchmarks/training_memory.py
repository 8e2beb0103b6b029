"""Peak memory of a training step against its length.

A narrow Llama with windows in every layer, so that a step's time grows with its length and not with the square. On a
CPU the growth of the process's largest resident size, counted from a reset after freed memory was given back.
"""

import ctypes
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.benchmark import Benchmark, Row
from benchmarks.ranks import Run, start_ranks
from models.llama import SHARDING, Llama, LlamaArgs
from torchtitan_cp.attention import AttentionMask, ContextParallel, Plan
from torchtitan_cp.config import Config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.optim.loss import ChunkedCrossEntropy
from torchtitan_cp.parallel.apply import parallelize
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.runtime.device import find_device
from torchtitan_cp.training.model import LayerAttention

SHAPE = LlamaArgs(128, 4, 4, 2, 32, 352, vocab_size=8192, windows=(1024,))
CHUNK = 1024
M_MMAP_THRESHOLD = -3  # of malloc.h

# name -> (logits in chunks, [activation])
STEPS: dict[str, tuple[bool, dict[str, Any]]] = {
    "naive logits": (False, {}),
    "chunked loss": (True, {}),
    "+ full": (True, {"checkpoint": "full"}),
    "+ attention_saved": (True, {"checkpoint": "attention_saved"}),
    "+ full, MLP in 8 tiles": (True, {"checkpoint": "full", "mlp_tiles": 8}),
    "+ attention_saved, MLP in 8 tiles": (True, {"checkpoint": "attention_saved", "mlp_tiles": 8}),
}


def bytes_per_token(name: str) -> float:
    """What a step keeps of a token, by docs/memory.md, in fp32."""
    queries, keys = SHAPE.n_heads * SHAPE.head_dim, SHAPE.n_kv_heads * SHAPE.head_dim
    chunked, activation = STEPS[name]
    kind = activation.get("checkpoint", "none")
    everything = 4 * SHAPE.dim + 2 * queries + 2 * keys + 4 * SHAPE.ffn_dim + SHAPE.n_heads
    kept = {"none": everything, "full": SHAPE.dim, "attention_saved": SHAPE.dim + queries + SHAPE.n_heads}[kind]
    # Beside the blocks: the last norm's input and output, and the gradient of the hidden states.
    head = 3 * SHAPE.dim + (0 if chunked else 3 * SHAPE.vocab_size)
    # One block is whole while it is recomputed; its MLP in tiles never is.
    block = 0.0
    if kind != "none":
        block = everything - (4 * SHAPE.ffn_dim * (1 - 1 / activation.get("mlp_tiles", 1)))
    # Gradients inside a block's backward: of the MLP's three wide tensors, and of the residual stream twice.
    backward = 3 * SHAPE.ffn_dim / activation.get("mlp_tiles", 1) + 2 * SHAPE.dim
    return 4.0 * (SHAPE.n_layers * kept + head + block + backward)


def on_ranks(name: str, seq_len: int) -> Run:
    """A run that answers with the bytes that a forward and backward took at most."""
    # Else the C library, having seen large blocks freed, keeps blocks of up to 32 MiB for itself, in pieces.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    chunked, activation = STEPS[name]
    ranks, device = dist.get_world_size(), find_device()
    meshes = Meshes("cpu", Degrees(1, 1, ranks, 1, 1))
    base = Config()
    config = dataclasses.replace(
        base,
        training=dataclasses.replace(base.training, compute_dtype="float32"),
        activation=dataclasses.replace(base.activation, **activation),
    )
    with torch.device("meta"):
        model = Llama(SHAPE, LayerAttention())
    parallelize(model, meshes, SHARDING, config)
    model.set_rope([1.0 / 10000 ** (2 * i / SHAPE.head_dim) for i in range(SHAPE.head_dim // 2)], 1.0, device.device)
    plan: Plan = ContextParallel(meshes.for_cp(ranks)["cp"], "ring").plan(seq_len, AttentionMask(window=(1023, -1)))
    tokens, labels = (torch.randint(SHAPE.vocab_size, (1, plan.local_tokens)) for _ in range(2))

    def head(hidden: Tensor, output: nn.Linear) -> Tensor:
        if chunked:
            return ChunkedCrossEntropy(CHUNK)(hidden, output.weight, labels)[0]
        return F.cross_entropy(output(hidden).flatten(0, 1), labels.flatten(), reduction="sum")

    def run() -> int:
        model.zero_grad(set_to_none=True)
        device.reset_peak_memory()
        before = device.peak_memory_bytes()
        (model(tokens, plan.positions, {mixer.window: plan for mixer in SHAPE.mixers}, head) / seq_len).backward()
        return device.peak_memory_bytes() - before

    return run


def measure(lengths: list[int], steps: list[str], ranks: list[int], naive_up_to: int) -> Iterator[Row]:
    """Peak MiB of the rank with most, and its growth for each token of a rank beside what docs/memory.md says.

    fp32; naive_up_to: tokens of a rank whose logits fit.
    """
    for count, name in itertools.product(ranks, steps):
        row: Row = {"ranks": count, "step": name}
        peaks: dict[int, float] = {}
        with start_ranks(count) as group:
            for length in lengths:
                if STEPS[name][0] or length // count <= naive_up_to:
                    group.make(on_ranks, name, length)
                    peaks[length] = max(group.answer()) / 2**20
                    row[f"{length:,}_mib"] = peaks[length]
        shortest, longest = min(peaks), max(peaks)
        row["kib_a_token"] = (peaks[longest] - peaks[shortest]) * 1024 / max(1, longest - shortest) * count
        yield row | {"formula": bytes_per_token(name) / 1024}


BENCHMARK = Benchmark(
    measure,
    {"lengths": [4096, 16384, 65536, 262144], "steps": list(STEPS), "ranks": [1, 2], "naive_up_to": 65536},
    {"lengths": [2048, 8192], "steps": ["naive logits", "chunked loss", "+ full"], "ranks": [1]},
    {"steps": list(STEPS)},
)
