"""Optimizer state in host memory; during a step, that of a few parameters at a time is on the device."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from torchtitan_cp.optim.optimizers import Groups


def keep_state_on_host(optimizer: Optimizer, parts_of: Callable[[Groups], Iterator[Groups]]) -> None:
    """Keep the optimizer's state in pinned host memory, by replacing its `step`.

    The new step updates one part of the parameters at a time while the next one's state is copied to the device; the
    numbers are those of the optimizer's own step.

    Args:
        parts_of: (parameter groups) -> the parts, as groups of a few parameters.
    """
    device = optimizer.param_groups[0]["params"][0].device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    own_step = optimizer.step

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    def to_host(tensor: Tensor) -> Tensor:
        if stream:
            tensor.record_stream(stream)
        host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        return host.copy_(tensor, non_blocking=True)

    def move(part: Groups, copy: Callable[[Tensor], Tensor]) -> None:
        """Replace the state of these parameters by copies; step counters stay where they are."""
        with torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext():
            for parameter in (parameter for group in part for parameter in group["params"]):
                for name, value in optimizer.state.get(parameter, {}).items():
                    if value.ndim:
                        optimizer.state[parameter][name] = _map_plain(value, copy)

    def step(closure: None = None) -> None:  # torch passes it when it makes the state for a checkpoint
        groups, parts = optimizer.param_groups, list(parts_of(optimizer.param_groups))
        move(parts[0], to_device)
        try:
            for part, next_part in zip(parts, [*parts[1:], []], strict=True):
                if stream:
                    torch.cuda.current_stream(device).wait_stream(stream)
                move(next_part, to_device)
                optimizer.param_groups = part
                own_step()
                if stream:
                    stream.wait_stream(torch.cuda.current_stream(device))
                move(part, to_host)
        finally:
            optimizer.param_groups = groups
        if stream:
            stream.synchronize()  # a checkpoint may read the copies next

    optimizer.step = step  # type: ignore[method-assign, assignment]


def _map_plain(value: object, function: Callable[[Tensor], Tensor]) -> object:
    """Apply a function to a tensor, or to the plain tensors inside a DTensor or a quantized tensor."""
    if is_traceable_wrapper_subclass(value):
        # Since torch 2.13 a DTensor's parts include its mesh, which is no tensor.
        return transform_subclass(value, lambda _, part: _map_plain(part, function))
    return function(value) if isinstance(value, Tensor) else value
