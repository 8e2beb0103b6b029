"""This machine as an entry of the planner's table, measured on the config's own sizes in a few seconds."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from torchtitan_cp.attention import AttentionMask, attend, make_plan
from torchtitan_cp.attention.ring_cost import BACKWARD_FLOPS, FORWARD_FLOPS
from torchtitan_cp.attention.tiles import count_pairs
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.metrics.throughput import find_peak
from torchtitan_cp.planner.devices import ACCELERATORS, MEMORY_BANDWIDTH, Accelerator
from torchtitan_cp.runtime.device import Device, find_device

TOKENS = {"cpu": 4096, "cuda": 16384}  # most tokens of the tensors here; fewer leave a GPU idle
SECONDS = 0.3  # how long each kernel is run


def measure_accelerator(config: Config, args: ModelArgs, ranks_per_node: int) -> Accelerator:
    """Measured rates of one rank of this machine; links and networks are those of the table for this device.

    Args:
        args: ModelArgs with `vocab_size` set.
        ranks_per_node: on a CPU, these ranks share the host's memory.

    Raises:
        ConfigError: the GPU is not in the table.
    """
    device = find_device()
    if ranks_per_node > 1:
        torch.set_num_threads(1)  # as torchrun starts them
    base, dtype = table_entry(device), getattr(torch, config.training.compute_dtype)
    tokens = min(TOKENS[device.device.type], max(stage.seq_len for stage in config.curriculum.stages))
    peak = find_peak(device.device, device.name, dtype, config.metrics.peak_tflops).flops_per_second
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory_bytes = host_bytes / ranks_per_node
    if device.device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device.device).total_memory
    new = partial(torch.randn, dtype=dtype, device=device.device)
    forward, backward = _attention_rates(new, args, tokens)
    return replace(
        base,
        peak_flops=base.peak_flops | {dtype: peak},
        memory_bytes=memory_bytes,
        host_bytes=host_bytes if device.device.type == "cuda" else 0.0,
        memory_bandwidth=_bandwidth(new, args, tokens) / MEMORY_BANDWIDTH,
        linear=_product_rate(new, args, tokens) / peak,
        attention_forward=forward / peak,
        attention_backward=backward / peak,
        measured=True,
        source=f"{device.name}, measured now on this config's shapes; its messages: {base.source}",
    )


def table_entry(device: Device) -> Accelerator:
    """This device in the planner's table."""
    for name, accelerator in ACCELERATORS.items():
        if name.partition("-")[0] in device.name.lower():
            return accelerator
    raise ConfigError(
        f"the planner's table does not have {device.name}, so its links are unknown",
        fix=f"use --device with one of {', '.join(ACCELERATORS)}",
    )


def _seconds(run: Callable[[], object]) -> float:
    """Median time of a call, after a warm-up; on a GPU it includes waiting for the result."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=SECONDS).median


def _product_rate(new: Callable[..., Tensor], args: ModelArgs, tokens: int) -> float:
    """FLOP/s of one product of an MLP and its two gradients; `new` makes a tensor of a given size."""
    x, weight, gradient = new(tokens, args.dim), new(args.ffn_dim, args.dim), new(tokens, args.ffn_dim)
    seconds = _seconds(lambda: (x @ weight.T, gradient @ weight, gradient.T @ x))
    return 6 * tokens * args.dim * args.ffn_dim / seconds


def _bandwidth(new: Callable[..., Tensor], args: ModelArgs, tokens: int) -> float:
    """Bytes/s of an elementwise product of two wide activations."""
    a, b = new(tokens, args.ffn_dim), new(tokens, args.ffn_dim)
    return 3 * a.nbytes / _seconds(lambda: a * b)


def _attention_rates(new: Callable[..., Tensor], args: ModelArgs, tokens: int) -> tuple[float, float]:
    """FLOP/s of attention, forward and backward, counting allowed pairs, as a mean over the layers' windows."""
    heads = (args.n_heads, args.n_kv_heads, args.n_kv_heads, args.n_heads)
    q, k, v, dout = (new(1, tokens, count, args.head_dim).requires_grad_() for count in heads)
    pairs, forward, backward = 0, 0.0, 0.0
    for window, layers in Counter(mixer.window for mixer in args.mixers if mixer.n_heads).items():
        mask = AttentionMask().windowed(window)
        run = partial(attend, q, k, v, make_plan(tokens, mask=mask))
        pairs += layers * count_pairs(tokens, tokens, mask.band)
        with torch.no_grad():
            forward += layers * _seconds(run)
        backward += layers * _seconds(partial(torch.autograd.grad, run(), (q, k, v), dout, retain_graph=True))
    work = args.head_dim * args.n_heads * pairs
    return FORWARD_FLOPS * work / forward, BACKWARD_FLOPS * work / backward
