"""What blocks keep between forward and backward, in host memory: copied out and back beside the computation.

A tensor goes to pinned memory on a stream of its own as soon as it is kept, and its room on the device is free
once the copy is done. In backward the one kept before it is fetched while the block at hand computes. Sources:
saved_tensors_hooks of torch.autograd.graph; activation offloading in torchtune.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

SMALLEST_BYTES = 1 << 20


class Parked:
    """A tensor on its way to the host, there, or on its way back.

    Attributes:
        before: the tensor parked just before this one, if it is still needed.
    """

    def __init__(self, lot: "HostMemory", tensor: Tensor, before: "Parked | None") -> None:
        self.lot, self.device, self.size_bytes = lot, tensor.device, tensor.nbytes
        self.before = weakref.ref(before) if before else None
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.back: Tensor | None = None
        with lot.beside(tensor):
            self.host.copy_(tensor, non_blocking=True)

    def fetch(self) -> None:
        """Start the copy back, unless it is under way."""
        if self.back is None:
            with self.lot.beside():
                self.back = torch.empty_like(self.host, device=self.device)
                self.back.copy_(self.host, non_blocking=True)

    def take(self) -> Tensor:
        """The tensor on its device again; the one parked before it starts on its way."""
        self.fetch()
        back, self.back = self.back, None
        assert back is not None
        self.lot.wait_for(back)
        before = self.before() if self.before else None
        if before is not None:
            before.fetch()
        return back


class HostMemory:
    """Where a model's blocks park what they keep.

    Args:
        device: the one that computes; on a CPU the copies are made all the same, which serves tests.
        smallest_bytes: what is smaller stays.

    Attributes:
        parked_bytes: copied out so far.
    """

    def __init__(self, device: torch.device, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self.smallest_bytes, self.parked_bytes = smallest_bytes, 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: weakref.ref[Parked] | None = None

    def beside(self, source: Tensor | None = None) -> Any:
        """A context whose copies run beside the computation; after what computes `source`, which lives until then."""
        if self.stream is None:
            return nullcontext()
        if source is not None:
            self.stream.wait_stream(torch.cuda.current_stream(source.device))
            _plain(source).record_stream(self.stream)
        return torch.cuda.stream(self.stream)

    def wait_for(self, tensor: Tensor) -> None:
        """What is computed from here on sees the copy back, and the tensor's room is not reused before."""
        if self.stream is not None:
            current = torch.cuda.current_stream(tensor.device)
            current.wait_stream(self.stream)
            _plain(tensor).record_stream(current)

    def park(self, tensor: Tensor) -> Any:
        """A Parked in the tensor's place, or the tensor itself where it is small."""
        if tensor.nbytes < self.smallest_bytes:
            return tensor
        parked = Parked(self, tensor, self.last() if self.last else None)
        self.last = weakref.ref(parked)
        self.parked_bytes += parked.size_bytes
        return parked

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward (hidden `[B, s, E]`, others) that parks what autograd keeps of it.

        What has fewer than three dims is a weight, and stays; so do the other inputs, which all blocks share.
        """

        def run(hidden: Tensor, *others: Any) -> Any:
            shared = {x.data_ptr() for x in others if isinstance(x, Tensor)}

            def pack(tensor: Tensor) -> Any:
                stays = tensor.ndim < 3 or tensor.data_ptr() in shared
                return tensor if stays else self.park(tensor.detach())

            with saved_tensors_hooks(pack, taken):
                return forward(hidden, *others)

        return run

    def keeping(self, operator: Any) -> Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]:
        """For `checkpoint(context_fn=…)`: the outputs of an operator are parked, and not computed again."""

        def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
            outputs: list[Any] = []
            return _Keep(operator, self.park, outputs), _Recall(operator, outputs)

        return contexts


def _plain(tensor: Tensor) -> Tensor:
    """This rank's shard, of what tensor parallelism has made a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def taken(parked: Any) -> Any:
    """What `park` was given."""
    return parked.take() if isinstance(parked, Parked) else parked


class _Keep(TorchDispatchMode):
    def __init__(self, operator: Any, park: Callable[[Tensor], Any], outputs: list[Any]) -> None:
        super().__init__()
        self.operator, self.park, self.outputs = operator, park, outputs

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is self.operator:
            self.outputs.append(tree_map(self.park, result))
        return result


class _Recall(TorchDispatchMode):
    def __init__(self, operator: Any, outputs: list[Any]) -> None:
        super().__init__()
        self.operator, self.outputs = operator, outputs

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is self.operator:
            return tree_map(taken, self.outputs.pop(0))
        return function(*args, **(kwargs or {}))
