"""The parts of `benchmarks/cuda.sh` that time kernels by themselves: attention, matrix products, memory, host copies.

Each figure is beside the planner's, which is what a step's prediction is made of.
"""

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.budget import accelerator_here
from benchmarks.cuda_record import Record, beside
from benchmarks.kernels import rates as attention_rates
from benchmarks.kernels import steps_of, timed
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.attention.kernels import KERNELS, Case
from torchtitan_cp.planner.devices import MEMORY_BANDWIDTH

NAMES = ("cudnn", "flash", "flash4")
DENSE_ALONE = ("cudnn",)  # `auto` never takes it for windows and documents, and each length is a plan to build
HEADS, DIMS = (32, 8), (128, 64)
TERA, GIGA = 1e12, 1e9


def kernels(record: Record) -> None:
    """Kernels in one call on 32K tokens: causal, in documents of 4,096, in windows of 4,096; forward and backward."""
    device, dtype, length, part = torch.device("cuda"), torch.bfloat16, 32768, 4096
    if record.rehearsal:
        device, dtype, length, part = torch.device("cpu"), torch.float32, 128, 32
    masks = {
        "causal": AttentionMask(),
        f"documents of {part}": AttentionMask(document_lengths=((part,) * (length // part),)),
        f"windows of {part}": AttentionMask().windowed(part),
    }
    accelerator = accelerator_here()
    for name in set(NAMES) - set(KERNELS):
        record.write(name, "not run", f"there is no kernel of this name; there are {', '.join(KERNELS)}")
    for dim, (kind, mask), name in product(DIMS, masks.items(), [name for name in NAMES if name in KERNELS]):
        case, dense = f"{name}, head dim {dim}, {kind}", kind == "causal"
        if name in DENSE_ALONE and not dense:
            continue
        if why := KERNELS[name].refusal(Case(device.type, dtype, dim, dim, dense=dense)):
            record.write(case, "not run", why)
            continue
        steps = steps_of(make_plan(length, mask=mask))
        try:
            found = attention_rates(steps, KERNELS[name], length, HEADS, dim, device, dtype, rounds=3)
        except Exception as error:  # what one kernel lacks, or fails in, is no other's failure
            record.case(case, False, f"{type(error).__name__}: {error}"[:300])
            continue
        shares, peak = accelerator.attention(name, dim, dense), accelerator.peak_flops[dtype]
        forward, backward = (
            beside(f"{way}_tflops", flops / TERA, share * peak / TERA)
            for way, flops, share in zip(("forward", "backward"), found, shares, strict=True)
        )
        record.case(case, **forward, **backward)


def rates(record: Record) -> None:
    """The 8B's matrix products on 32K tokens with both gradients, device memory, and copies to the host and back."""
    device, dtype, tokens, chunk = torch.device("cuda"), torch.bfloat16, 32768, 4096
    dim, keys, ffn, vocabulary, copied = 4096, 1024, 14336, 32064, 1 << 30
    if record.rehearsal:
        device, dtype, tokens, chunk = torch.device("cpu"), torch.float32, 128, 64
        dim, keys, ffn, vocabulary, copied = 64, 32, 128, 256, 1 << 20
    accelerator, new = accelerator_here(), partial(torch.randn, device=device, dtype=dtype)
    predicted = accelerator.peak_flops[dtype] * accelerator.linear / TERA
    for name, rows, inputs, outputs in (
        ("queries, output of attention", tokens, dim, dim),
        ("keys, values", tokens, dim, keys),
        ("MLP, up", tokens, dim, ffn),
        ("MLP, down", tokens, ffn, dim),
        (f"output layer on {chunk} tokens", chunk, dim, vocabulary),
    ):
        x, weight, gradient = new(rows, inputs), new(outputs, inputs), new(rows, outputs)
        flops = 2 * rows * inputs * outputs / TERA
        figures: dict[str, Any] = {"predicted_tflops": predicted}
        for way, run in {
            "forward": lambda x=x, weight=weight: x @ weight.T,
            "input_gradient": lambda gradient=gradient, weight=weight: gradient @ weight,
            "weight_gradient": lambda gradient=gradient, x=x: gradient.T @ x,
        }.items():
            figures[f"{way}_tflops"] = flops / timed(run, device, rounds=5)
            figures[f"{way}_of_predicted"] = figures[f"{way}_tflops"] / predicted
        record.case(f"product: {name}", **figures)
    wide = new(2, tokens, ffn)
    moved = 3 * wide[0].nbytes / timed(partial(torch.mul, *wide), device, rounds=5)
    share = accelerator.memory_bandwidth * MEMORY_BANDWIDTH
    record.case("memory: product of two tensors", **beside("gigabytes_per_second", moved / GIGA, share / GIGA))
    _copies(record, device, copied, accelerator.host_bandwidth)


def _copies(record: Record, device: torch.device, size: int, predicted: float) -> None:
    """Copies of so many bytes over the link to pinned host memory, one way and both at once."""
    on_cuda = device.type == "cuda"
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.stream(torch.cuda.Stream()) if on_cuda else nullcontext() for _ in range(2)]

    def copy(target: Tensor, source: Tensor, number: int) -> None:
        with streams[number]:
            target.copy_(source, non_blocking=True)

    def both() -> None:
        copy(devices[0], hosts[0], 0)
        copy(hosts[1], devices[1], 1)

    for name, run in {
        "to the device": lambda: copy(devices[0], hosts[0], 0),
        "to the host": lambda: copy(hosts[1], devices[1], 1),
        "each way, both at once": both,
    }.items():
        rate = size / timed(run, device, rounds=3)
        record.case(f"copy: {name}", **beside("gigabytes_per_second", rate / GIGA, predicted / GIGA))
