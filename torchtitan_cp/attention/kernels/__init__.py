"""Attention on one rank, one file per kernel: a tile forward to (out, lse), and backward from a merged lse.

Shapes everywhere: q `[B, Sq, Hq, Dqk]`, k `[B, Sk, Hkv, Dqk]`, v `[B, Sk, Hkv, Dv]`, out `[B, Sq, Hq, Dv]` in
q's dtype, lse `[B, Sq, Hq]`, natural log, fp32 (fp64 for fp64). Hq is a multiple of Hkv. Sq, Sk >= 1, and
every query row sees a key. Imports torch only.
"""

import logging
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from torchtitan_cp.attention.errors import PlanError, check_name
from torchtitan_cp.attention.kernels import cpu, cudnn, efficient, flash, flex, reference
from torchtitan_cp.attention.kernels.kernel import Alibi, Case, Kernel, Scores

logger = logging.getLogger(__name__)

# In the order in which `auto` tries them: flash first, which takes windows and grouped heads as they are; reference,
# which holds every score in memory, last.
KERNELS: dict[str, Kernel] = {
    "flash": flash.KERNEL,
    "cudnn": cudnn.KERNEL,
    "efficient": efficient.KERNEL,
    "cpu": cpu.KERNEL,
    "flex": flex.KERNEL,
    "reference": reference.KERNEL,
}


def check_kernel(name: str) -> str:
    """Return `name`, or raise PlanError unless it is `auto` or a registered kernel."""
    if name == "fp8":
        raise PlanError(
            "attention kernel 'fp8' is not available: PyTorch's FP8 attention (FlashAttention-3's) has no backward",
            fix="carry keys and values in 8 bits with kv_transfer = 'float8', and use kernel = 'auto'",
        )
    return check_name("attention kernel", name, ("auto", *KERNELS))


def choose_kernel(
    name: str, q: Tensor, v: Tensor, softcap: bool = False, alibi: bool = False, merged: bool = False
) -> Kernel:
    """The kernel `name`, or for "auto" the first that can run these tensors.

    Args:
        softcap, alibi: whether scores are capped, and have linear biases.
        merged: whether its outputs will be merged; if it can, the kernel then returns them unrounded.

    Raises:
        PlanError: the kernel cannot run them; the message says why and which can.
    """
    kernel = _choose(name, Case(q.device.type, q.dtype, q.shape[-1], v.shape[-1], softcap, alibi))
    return replace(kernel, forward=kernel.wide_forward) if merged and kernel.wide_forward else kernel


@lru_cache(maxsize=256)
def _choose(name: str, case: Case) -> Kernel:
    reasons = {other: kernel.refusal(case) for other, kernel in KERNELS.items()}
    able = [other for other, reason in reasons.items() if reason is None]
    if name == "auto" and able:
        logger.info("attention kernel %s for %s on %s", able[0], str(case.dtype).removeprefix("torch."), case.device)
        logger.debug("other kernels: %s", "; ".join(f"{other}: {why}" for other, why in reasons.items() if why))
        return KERNELS[able[0]]
    if name in able:
        return KERNELS[name]
    raise PlanError(
        f"attention kernel {name!r} cannot run this: {reasons.get(name, 'no kernel can')}",
        fix=f"use {' or '.join(able)}" if able else "take one of the options away",
    )


__all__ = ["KERNELS", "Alibi", "Kernel", "Scores", "check_kernel", "choose_kernel"]
