"""Walks a stage on the GPU of `fake_cuda`: the dry run with a GPU's operations, up to the call of each kernel.

Tensors claim to be on that GPU: attention, fused optimizer, mixed precision, offload and float8 run as they do there.
torch's meta functions say which shapes and devices an operation takes and returns, so a tensor on the wrong device, or
a shape that a kernel refuses, ends a walk; what is on the host is not counted. A walk cannot tell: numbers, time, what
NCCL, cuDNN and cuBLAS allocate for themselves, fragmentation, the order of streams, and dtypes or strides that a kernel
checks only when it runs (the meta functions of flash do not compare the dtypes of q, k and v).
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

from torchtitan_cp.planner.dry_run import stage_walker
from torchtitan_cp.planner.fake import FakeMode
from torchtitan_cp.training.resolve import ResolvedRun


class GpuMode(FakeMode):
    """Also makes tensors that claim to be on the GPU, or in pinned memory."""

    avoid_device_init = True  # an operation copies numbers to a GPU, and the tracker sees it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._pin_memory.default:
            return torch.empty_like(args[0])
        if func is torch.ops.aten.addmm.dtype_out:  # has no fake form
            return kwargs["out"]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def is_real(self, args: Any, kwargs: Any) -> bool:
        device = kwargs.get("device")
        on_gpu = device is not None and torch.device(device).type == "cuda"
        return not on_gpu and super().is_real(args, kwargs)


def gpu_walker(run: ResolvedRun, rank: int) -> AbstractContextManager[Any]:
    """As `stage_walker`, in a process that called `use_fake_cuda`."""
    return stage_walker(run, rank, "cuda", GpuMode)
