"""Optimizer state in host memory while it is not used: during forward and backward, where activations need the room."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def keep_state_on_host(optimizer: Optimizer) -> None:
    """Copy the state to the parameters' device before each step and to pinned host memory after it."""
    device = optimizer.param_groups[0]["params"][0].device

    def to_device(*_: object) -> None:
        for tensor in _plain_state(optimizer):
            tensor.data = tensor.to(device, non_blocking=True)

    def to_host(*_: object) -> None:
        for tensor in _plain_state(optimizer):
            host = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda")
            tensor.data = host.copy_(tensor, non_blocking=True)
        if device.type == "cuda":
            # A checkpoint may read the copies next.
            torch.cuda.synchronize(device)

    optimizer.register_step_pre_hook(to_device)
    optimizer.register_step_post_hook(to_host)


def _plain_state(optimizer: Optimizer) -> Iterator[Tensor]:
    """The plain tensors inside the state's DTensors and quantised tensors; step counters stay where they are."""
    for state in optimizer.state.values():
        for tensor in state.values():
            if tensor.ndim:
                yield from _plain_tensors(tensor)


def _plain_tensors(value: object) -> Iterator[Tensor]:
    if is_traceable_wrapper_subclass(value):
        # Since torch 2.13 a DTensor's parts are not only tensors: its mesh is one.
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
