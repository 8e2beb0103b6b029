"""What keys and values carried in 8 bits cost in precision and save in bytes."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.benchmark import Benchmark, Row
from benchmarks.simulation import Simulation, simulate

DRAWS = {
    "normal": lambda k: k,
    "4 channels 30 times larger": lambda k: k * torch.ones(k.shape[-1]).index_fill(0, torch.arange(4), 30.0),
    "1 row in 64 100 times larger": lambda k: (
        k * torch.ones(k.shape[1], 1, 1).index_fill(0, torch.arange(0, k.shape[1], 64), 100.0)
    ),
}


def errors(result: Simulation, exact: Simulation) -> list[float]:
    """Relative L2 error of out, dq, dk, dv."""
    pairs = [(getattr(result, name), getattr(exact, name)) for name in ("out", "dq", "dk", "dv")]
    return [((got.double() - want).norm() / want.norm()).item() for got, want in pairs]


def measure(seq_len: int, ranks: int) -> Iterator[Row]:
    """Simulated ranks, ring, H 8/2, D 128: relative L2 error against fp64, and MiB that a rank sends forward."""
    for kind, dtype, transfer in itertools.product(DRAWS, (torch.bfloat16, torch.float32), ("exact", "float8")):
        torch.manual_seed(0)
        q, k, v, dout = (torch.randn(1, seq_len, heads, 128) for heads in (8, 2, 2, 8))
        tensors: list[Tensor] = [x.to(dtype) for x in (q, DRAWS[kind](k), v, dout)]
        wide = [x.double() for x in tensors]
        exact = simulate(*wide[:3], ranks=1, dout=wide[3])
        result = simulate(*tensors[:3], ranks=ranks, strategy="ring", kv_transfer=transfer, dout=tensors[3])
        names = {"keys": kind, "inputs": str(dtype)[6:], "transfer": transfer}
        sent = max(map(sum, result.forward_bytes)) / 2**20
        yield names | dict(zip(("out", "dq", "dk", "dv"), errors(result, exact), strict=True)) | {"sent_mib": sent}


BENCHMARK = Benchmark(
    measure,
    {"seq_len": 2048, "ranks": 8},
    {"seq_len": 512, "ranks": 4},
)
