"""Optimizer state in host memory; in a step it is on the device for a few parameters at a time."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from torchtitan_cp.optim.muon import matrix_batches

# The parameters of one call of the optimizer's own step, as parameter groups of these alone.
Part = list[dict[str, Any]]


def keep_state_on_host(optimizer: Optimizer) -> None:
    """Hold the state in pinned host memory. A step takes one parameter after the other, with the next one's state on
    its way, and writes what a step of all of them would.

    Of Muon's matrices it takes as many at a time as ranks share them, since each of these orthogonalises one.
    """
    device = optimizer.param_groups[0]["params"][0].device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    step_all = optimizer.step

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    def to_host(tensor: Tensor) -> Tensor:
        if stream:
            tensor.record_stream(stream)
        host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        return host.copy_(tensor, non_blocking=True)

    def move(part: Part, moved: Callable[[Tensor], Tensor]) -> None:
        """Replace the state of these parameters; step counters stay where they are."""
        with torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext():
            for parameter in (parameter for group in part for parameter in group["params"]):
                for name, value in optimizer.state.get(parameter, {}).items():
                    if value.ndim:
                        optimizer.state[parameter][name] = _map_plain(value, moved)

    def step(closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "gradients exist before a step"
        groups, parts = optimizer.param_groups, _parts(optimizer.param_groups)
        move(parts[0], to_device)
        try:
            for part, following in zip(parts, [*parts[1:], []], strict=True):
                if stream:
                    torch.cuda.current_stream(device).wait_stream(stream)
                move(following, to_device)
                optimizer.param_groups = part
                step_all()
                if stream:
                    stream.wait_stream(torch.cuda.current_stream(device))
                move(part, to_host)
        finally:
            optimizer.param_groups = groups
        if stream:
            stream.synchronize()  # a checkpoint may read the copies next

    optimizer.step = step  # type: ignore[method-assign, assignment]


def _parts(groups: list[dict[str, Any]]) -> list[Part]:
    """One parameter each, and Muon's matrices in the batches that it takes."""
    alone = [[{**group, "params": [x]}] for group in groups if not group.get("muon") for x in group["params"]]
    return [*alone, *matrix_batches(groups)]


def _map_plain(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A tensor with the plain tensors inside it, of a DTensor or a quantized tensor, replaced."""
    if is_traceable_wrapper_subclass(value):
        # Since torch 2.13 a DTensor's parts are not only tensors: its mesh is one.
        return transform_subclass(value, lambda _, part: _map_plain(part, function))
    return function(value) if isinstance(value, Tensor) else value
