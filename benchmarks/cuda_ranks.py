"""Attention on real ranks against fp64, on the GPUs of this machine over NCCL: a part of `benchmarks/cuda.sh`.

Run by torchrun; rank 0 records. The cases and what they are compared with are those of the conformance tests.
"""

import argparse
import importlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cuda_parts import Record
from torchtitan_cp.attention import ContextParallel
from torchtitan_cp.attention.layout import LAYOUTS
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.runtime.device import start_ranks, stop_ranks

# Roundings as in the conformance tests; of bf16 those of a chunk's values.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
CHOSEN = ("causal", "window", "documents", "documents with gaps")
TIMEOUT_SECONDS = 100.0


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--rehearsal", action="store_true")
    options = parser.parse_args(arguments)
    record = Record(options.results, "conformance", options.rehearsal)
    tests = importlib.import_module("tests.ranks.attention.test_conformance")  # not checked by mypy
    world = start_ranks(TIMEOUT_SECONDS)
    device, size = world.device.device, world.size
    dtypes, masks = ([torch.float64], CHOSEN[2:3]) if options.rehearsal else ([torch.float32, torch.bfloat16], CHOSEN)
    for dtype, strategy in itertools.product(dtypes, STRATEGIES):
        shape = (size // 2, 2) if strategy == "hybrid" else (size,)
        mesh = init_device_mesh(device.type, shape)
        for layout, mask in itertools.product(LAYOUTS, masks):
            tensors = [x.to(device) for x in tests.inputs("GQA 4:1", "64/64", dtype)]
            got = tests.run(ContextParallel(mesh, strategy, "auto", layout), tensors, tests.MASKS[mask])
            if world.rank == 0:
                want = tests.expected(mask, "GQA 4:1", "64/64", dtype)
                errors = [tests.worst(x.cpu(), y)[0] for x, y in zip(got, want, strict=True)]
                name = f"{strategy}, {layout}, {mask}, {str(dtype).removeprefix('torch.')}"
                # Not a number is no error that is small enough.
                passed = all(error < TOLERANCE[dtype] for error in errors)
                record.case(name, passed, "" if passed else f"relative errors {errors} of out, dq, dk, dv")
    stop_ranks()


if __name__ == "__main__":
    main(sys.argv[1:])
