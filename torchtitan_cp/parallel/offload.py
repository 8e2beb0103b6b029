"""What blocks save for backward, in host memory: copied out and back while the device computes.

A tensor is copied to pinned memory on a stream of its own as soon as it is saved, and its device memory is free once
the copy is done. When backward restores a tensor, the copy back of the one saved before it starts as well. Sources:
saved_tensors_hooks of torch.autograd.graph; activation offloading in torchtune.
"""

import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from torchtitan_cp.attention.local_shard import local_tensor

P = ParamSpec("P")
Result = TypeVar("Result")

MIN_BYTES = 1 << 20


class OffloadedTensor:
    """A tensor that is being copied to the host, is there, or is being copied back.

    Attributes:
        previous: weak reference to the tensor that was offloaded just before this one.
        uses: how often it was saved and not yet restored.
    """

    def __init__(self, memory: "HostMemory", tensor: Tensor) -> None:
        self.memory, self.device, self.previous = memory, tensor.device, memory.last
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.back: Tensor | None = None
        self.uses = 1
        with memory.copy_stream(tensor):
            self.host.copy_(tensor, non_blocking=True)

    def fetch(self) -> Tensor:
        """The tensor that the copy back fills; starts that copy if it has not started."""
        if self.back is None:
            with self.memory.copy_stream():
                self.back = torch.empty_like(self.host, device=self.device)
                self.back.copy_(self.host, non_blocking=True)
        return self.back

    def restore(self) -> Tensor:
        """The tensor on its device; also starts to fetch the one that was offloaded before it."""
        back = self.fetch()
        self.uses -= 1
        if self.uses <= 0:
            self.back = None
        self.memory.wait_for(back)
        previous = self.previous() if self.previous else None
        if previous is not None and previous.uses > 0:  # an autograd node restores its tensors in any order
            previous.fetch()
        return back


class HostMemory:
    """Holds what a model's blocks save for backward.

    Args:
        device: the one that computes. On a CPU copies are made too, for tests.
        min_bytes: smaller tensors stay on the device.
    """

    def __init__(self, device: torch.device, min_bytes: int = MIN_BYTES) -> None:
        self.min_bytes = min_bytes
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: weakref.ref[OffloadedTensor] | None = None

    def copy_stream(self, source: Tensor | None = None) -> AbstractContextManager[object]:
        """A context for copies beside the computation. They start after `source` is computed, and keep its memory."""
        if self.stream is None:
            return nullcontext()  # torch.cuda.stream(None) needs CUDA
        if source is not None:
            self.stream.wait_stream(torch.cuda.current_stream(source.device))
            local_tensor(source).record_stream(self.stream)
        return torch.cuda.stream(self.stream)

    def wait_for(self, tensor: Tensor) -> None:
        """Have the computation wait for the copies, and keep the tensor's memory until the computation is done."""
        if self.stream is not None:
            current = torch.cuda.current_stream(tensor.device)
            current.wait_stream(self.stream)
            local_tensor(tensor).record_stream(current)

    def offload(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        """An OffloadedTensor in place of the tensor, or the tensor itself if it is small."""
        if tensor.nbytes < self.min_bytes:
            return tensor
        offloaded = OffloadedTensor(self, tensor)
        self.last = weakref.ref(offloaded)
        return offloaded

    def offload_saved(self, forward: Callable[P, Result], block: nn.Module) -> Callable[P, Result]:
        """The block's forward (hidden `[B, s, E]`, others; or by name), which offloads what autograd saves in it.

        The block's gathered weights stay on the device; so do the other inputs, which all blocks share. A tensor that
        several operations save, as parallel linear layers do, is copied once.
        """

        def run(*inputs: P.args, **named: P.kwargs) -> Result:
            _, *shared_inputs = (x for x in tree_leaves((inputs, named)) if isinstance(x, Tensor))
            saved: dict[Hashable, tuple[StorageWeakRef, Tensor | OffloadedTensor]] = {}

            def pack(tensor: Tensor) -> tuple[Tensor | OffloadedTensor, Tensor, int]:
                storage = storage_of(tensor)
                # Looked up each time, as experts with a mesh of their own are gathered only when they run.
                staying = (storage_of(x)._cdata for x in (*shared_inputs, *block.parameters()))
                counter = local_tensor(tensor).detach()  # shares the tensor's version counter
                if tensor.nbytes < self.min_bytes or storage._cdata in staying:
                    return tensor, counter, counter._version
                counter.data = counter.new_empty(0)  # but not its memory
                # While the weak reference exists, no other storage has this number.
                key = storage._cdata, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride()
                reference, held = saved.get(key, (None, None))
                if isinstance(held, OffloadedTensor) and reference and not reference.expired():
                    held.uses += 1
                else:
                    held = self.offload(tensor.detach())
                    saved[key] = StorageWeakRef(storage), held
                return held, counter, counter._version

            with saved_tensors_hooks(pack, _unpack):
                return forward(*inputs, **named)

        return run


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return local_tensor(tensor).untyped_storage()


def _unpack(saved: tuple[Tensor | OffloadedTensor, Tensor, int]) -> Tensor:
    """The saved tensor, after the check for writes in place that autograd makes without hooks."""
    tensor, counter, version = saved
    if counter._version != version:
        raise RuntimeError("a tensor that backward needs was written to in place after it was saved")
    return restore(tensor)


def restore(offloaded: Tensor | OffloadedTensor) -> Tensor:
    """The tensor that `offload` received."""
    return offloaded.restore() if isinstance(offloaded, OffloadedTensor) else offloaded
