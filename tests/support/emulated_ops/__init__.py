"""Stand-ins on a CPU for ATen's CUDA attention operators, so that the kernel files run their real code without a GPU.

They follow what ATen's sources say of each operator: alignment of masks, layout and padding of the log-sum-exp, what is
refused, and which strides are read or assumed. Beyond the real operators they take fp32 and fp64, so that a kernel
file can be compared at 1e-10. Memory that a real kernel leaves unwritten holds NaN here.

Read in the sources of torch 2.11 to 2.13: `torch/_meta_registrations.py`, and in `aten/src/ATen/native`
`transformers/cuda/{attention.cu, attention_backward.cu, sdp_utils.cpp}`, `transformers/cuda/flash_attn/flash_api.cpp`,
`transformers/cuda/mem_eff_attention/{kernel_forward, kernel_backward}.h` and `cudnn/MHA.cpp`; and in FlashAttention 2
`csrc/flash_attn/src/{mask, softmax, flash_fwd_kernel, flash_bwd_kernel}.h`. The package of `flash4` has a stand-in too.

    with emulate() as calls:
        out = cp.attention(q, k, v, plan)
    assert calls["_flash_attention_forward"] == 2
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.support.emulated_ops import cudnn, efficient, flash, flash4
from tests.support.emulated_ops.maths import MISREADINGS, reading
from torchtitan_cp.attention import kernels

Calls = Counter[str]
OPERATORS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash.forward,
    "_flash_attention_backward": flash.backward,
    "_scaled_dot_product_cudnn_attention": cudnn.forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn.backward,
    "_scaled_dot_product_efficient_attention": efficient.forward,
    "_scaled_dot_product_efficient_attention_backward": efficient.backward,
}
EMULATED = ("flash", "flash4", "cudnn", "efficient")
FLASH4 = ("_flash_attn_fwd", "_flash_attn_bwd")  # counted as flash4._flash_attn_fwd
_FOREVER = ExitStack()


@contextmanager
def emulate(misread: str = "") -> Iterator[Calls]:
    """Within the context, the operators run on CPU tensors and the kernels of EMULATED take them.

    Args:
        misread: one of MISREADINGS, a wrong reading of the sources that the operators then follow; "" for none.

    Yields:
        how often each operator was called so far.
    """
    assert misread in ("", *MISREADINGS), misread
    calls: Calls = Counter()
    with ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name, operator in OPERATORS.items():
            library.impl(name, _counted(name, operator, calls), "CPU")
        counted = {name: _counted(f"flash4.{name}", getattr(flash4.INTERFACE, name), calls) for name in FLASH4}
        interface = SimpleNamespace(**vars(flash4.INTERFACE) | counted)
        stack.enter_context(patch.object(kernels.flash4, "load_interface", lambda: interface))
        before = dict(kernels.KERNELS)
        stack.callback(_set_kernels, before)
        stack.enter_context(reading(misread))
        cudnn.PLANS.clear()
        every_dtype = before["reference"].dtypes
        _set_kernels(
            {
                name: replace(kernel, device="cpu", dtypes=every_dtype, refuses=lambda case: None, missing=None)
                if name in EMULATED
                else kernel
                for name, kernel in before.items()
            }
        )
        yield calls


def install() -> Calls:
    """As `emulate`, for the rest of the process."""
    return _FOREVER.enter_context(emulate())


def _counted(name: str, operator: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    lock = Lock()  # simulated ranks are threads

    @wraps(operator)
    def call(*arguments: Any, **options: Any) -> Any:
        with lock:
            calls[name] += 1
        return operator(*arguments, **options)

    return call


def _set_kernels(registered: dict[str, kernels.Kernel]) -> None:
    kernels.KERNELS.update(registered)
    kernels.choose_for_case.cache_clear()


__all__ = ["EMULATED", "MISREADINGS", "OPERATORS", "Calls", "emulate", "install"]
