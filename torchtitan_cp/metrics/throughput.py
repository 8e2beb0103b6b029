"""FLOPs of a token and the peak of a device: what MFU divides."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Dense peak without sparsity, TFLOP/s, by a part of the device's name. Source: NVIDIA's data sheets.
PEAKS = {
    ("H200", torch.bfloat16): 989.0,
    ("H100 PCIe", torch.bfloat16): 756.0,
    ("H100", torch.bfloat16): 989.0,
    ("H200", torch.float32): 67.0,
    ("H100", torch.float32): 67.0,
    ("A100", torch.bfloat16): 312.0,
    ("A100", torch.float32): 19.5,
    ("B200", torch.bfloat16): 2250.0,
    ("L40S", torch.bfloat16): 362.0,
}
MATMUL_SIZE = 1024
MEASURE_SECONDS = 0.3


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one rank's device, and where the number comes from."""

    flops_per_second: float
    source: str


def flops_per_token(
    linear_parameters: int,
    windows: Sequence[int],
    heads: int,
    head_dim: int,
    seq_len: int,
    keys: Sequence[float] | None = None,
) -> float:
    """FLOPs of training on one token: forward and twice that backward, recomputation not counted.

    6 per weight; attention's two products cost 12 x Hq x D a key that is seen, of which a causal token sees
    S/2 on average, and in a window of W fewer. Source: Kaplan et al., 2020, and appendix B of PaLM
    (Chowdhery et al., 2022), with the causal half.

    Args:
        windows: of each layer, 0 for none.
        keys: that a token sees in each layer, on average; None: those of one causal sequence.
    """
    if keys is None:
        keys = [w - w * w / (2 * seq_len) if 0 < w < seq_len else seq_len / 2 for w in windows]
    return 6.0 * linear_parameters + 12.0 * heads * head_dim * sum(keys)


def layer_costs(shape: Any, seq_len: int) -> list[float]:
    """FLOPs a token of each layer, with the embedding's in the first and the output's in the last.

    Args:
        shape: with `dim`, `vocab_size`, `n_layers`, `n_heads`, `head_dim`, `layer_windows`, `linear_parameters()`.
    """
    output = shape.dim * shape.vocab_size
    weights = (shape.linear_parameters() - output) // shape.n_layers
    costs = [flops_per_token(weights, [w], shape.n_heads, shape.head_dim, seq_len) for w in shape.layer_windows]
    costs[0] += shape.dim  # a look-up: one addition a number in backward
    costs[-1] += 6.0 * output
    return costs


def find_peak(device: torch.device, name: str, dtype: torch.dtype, stated_tflops: float) -> Peak:
    """Peak of one rank: as stated in the config, from the table, or measured by a matmul on this device."""
    if stated_tflops:
        return Peak(stated_tflops * 1e12, "metrics.peak_tflops")
    for (part, known_dtype), tflops in PEAKS.items():
        if part in name and known_dtype == dtype:
            return Peak(tflops * 1e12, f"data sheet of {part}, {dtype}")
    return Peak(_measure_matmul(device, dtype), f"measured by a {dtype} matmul of {MATMUL_SIZE} on one rank")


def _measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Best rate of a square matmul over a few tenths of a second."""
    a = torch.ones(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=dtype)
    float((a @ a)[0, 0])
    best, begun = 0.0, time.perf_counter()
    # Once at least, however busy the machine is.
    while not best or time.perf_counter() - begun < MEASURE_SECONDS:
        start = time.perf_counter()
        # Reading one number waits for the device.
        float((a @ a)[0, 0])
        best = max(best, 2 * MATMUL_SIZE**3 / (time.perf_counter() - start))
    return best
