"""Optimizer state in host memory while it is not used: during forward and backward, where activations need the room."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def keep_state_on_host(optimizer: Optimizer) -> None:
    """Copy the state to the parameters' device before each step and to pinned host memory after it."""
    device = optimizer.param_groups[0]["params"][0].device

    def fetch(*_: object) -> None:
        for tensor in _plain_state(optimizer):
            tensor.data = tensor.to(device, non_blocking=True)

    def put_back(*_: object) -> None:
        for tensor in _plain_state(optimizer):
            host = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda")
            tensor.data = host.copy_(tensor, non_blocking=True)
        if device.type == "cuda":
            # A checkpoint may read the copies next.
            torch.cuda.synchronize(device)

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(put_back)


def _plain_state(optimizer: Optimizer) -> Iterator[Tensor]:
    """What DTensors and quantised tensors of the state hold inside; counters stay where their optimizer wants them."""
    for state in optimizer.state.values():
        for tensor in state.values():
            if tensor.ndim:
                yield from _plain(tensor)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor
