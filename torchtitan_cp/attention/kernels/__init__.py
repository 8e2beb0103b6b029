"""Attention on one rank, one file a kernel: a tile forward to (out, lse), and back from a merged lse.

Shapes everywhere: q `[B, Sq, Hq, D]`, k `[B, Sk, Hkv, D]`, v `[B, Sk, Hkv, Dv]`, out `[B, Sq, Hq, Dv]` in
q's dtype, lse `[B, Sq, Hq]`, natural log, fp32 (fp64 for fp64). Hq is a multiple of Hkv. Sq, Sk >= 1; a
causal call has Sq == Sk. Imports torch only.
"""

import logging
from functools import lru_cache

import torch
from torch import Tensor

from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.kernels import cpu, flash, reference
from torchtitan_cp.attention.kernels.kernel import Kernel

logger = logging.getLogger(__name__)

KERNELS: dict[str, Kernel] = {"cpu": cpu.KERNEL, "flash": flash.KERNEL, "reference": reference.KERNEL}


def choose_kernel(name: str, q: Tensor, v: Tensor) -> Kernel:
    """The kernel `name`, or for "auto" the first that can run these tensors.

    Raises:
        PlanError: an unknown kernel, or one that cannot; the message says why and which can.
    """
    return _choose(name, q.device.type, q.dtype, q.shape[-1], v.shape[-1])


@lru_cache(maxsize=256)
def _choose(name: str, device: str, dtype: torch.dtype, qk_dim: int, v_dim: int) -> Kernel:
    refusals = {other: kernel.refusal(device, dtype, qk_dim, v_dim) for other, kernel in KERNELS.items()}
    able = [other for other, refusal in refusals.items() if refusal is None]
    if name == "auto":
        passed_over = "; ".join(f"{other}: {why}" for other, why in refusals.items() if why)
        logger.info("attention kernel %s for %s on %s (%s)", able[0], dtype, device, passed_over)
        return KERNELS[able[0]]
    if name not in KERNELS:
        raise PlanError(f"attention kernel {name!r} is not available", fix=f"use one of auto, {', '.join(KERNELS)}")
    if refusals[name]:
        raise PlanError(f"attention kernel {name!r} cannot run this: {refusals[name]}", fix=f"use {' or '.join(able)}")
    return KERNELS[name]


__all__ = ["KERNELS", "Kernel", "choose_kernel"]
