"""What keys and values carried in 8 bits cost in precision and save in bytes: `python -m benchmarks.float8`."""

import argparse

import torch
from torch import Tensor

from torchtitan_cp.attention import Simulation, simulate

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.seq_len} tokens, {options.ranks} simulated ranks, ring, H 8/2, D 128;")
    print("relative L2 error against fp64\n")
    print("| keys | inputs | transfer | out | dq | dk | dv | MiB a rank, forward |\n|---|---|---|---|---|---|---|---|")
    for kind, shape in DRAWS.items():
        torch.manual_seed(0)
        q, k, v, dout = (torch.randn(1, options.seq_len, heads, 128) for heads in (8, 2, 2, 8))
        k = shape(k)
        for dtype in (torch.bfloat16, torch.float32):
            tensors: list[Tensor] = [x.to(dtype) for x in (q, k, v, dout)]
            wide = [x.double() for x in tensors]
            exact = simulate(*wide[:3], ranks=1, dout=wide[3])
            for transfer in ("exact", "float8"):
                result = simulate(
                    *tensors[:3], ranks=options.ranks, strategy="ring", kv_transfer=transfer, dout=tensors[3]
                )
                sent = max(map(sum, result.forward_bytes)) / 2**20
                figures = " | ".join(f"{error:.1e}" for error in errors(result, exact))
                print(f"| {kind} | {str(dtype)[6:]} | {transfer} | {figures} | {sent:.2f} |", flush=True)


if __name__ == "__main__":
    main()
