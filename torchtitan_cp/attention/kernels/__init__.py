"""Attention on one rank, one file per kernel: a tile forward to (out, lse), and backward from a merged lse.

Shapes everywhere: q `[B, Sq, Hq, Dqk]`, k `[B, Sk, Hkv, Dqk]`, v `[B, Sk, Hkv, Dv]`, out `[B, Sq, Hq, Dv]` in
q's dtype, lse `[B, Sq, Hq]`, natural log, fp32 (fp64 for fp64). Hq is a multiple of Hkv. Sq, Sk >= 1, and
every query row sees a key. Imports torch only.
"""

import logging
from functools import lru_cache

import torch
from torch import Tensor

from torchtitan_cp.attention.errors import PlanError, check_name
from torchtitan_cp.attention.kernels import cpu, cudnn, efficient, flash, flex, reference
from torchtitan_cp.attention.kernels.kernel import Case, Kernel, ScoreMod

logger = logging.getLogger(__name__)

# In the order in which `auto` tries them, apart from PREFERRED. flash is first, as it takes windows, packed documents
# and grouped heads as they are; reference is last, since it holds every score in memory.
KERNELS: dict[str, Kernel] = {
    "flash": flash.KERNEL,
    "cudnn": cudnn.KERNEL,
    "efficient": efficient.KERNEL,
    "cpu": cpu.KERNEL,
    "flex": flex.KERNEL,
    "reference": reference.KERNEL,
}

# The kernel that `auto` tries first where all tiles are full or causal, by major compute capability. ATen's flash is
# FlashAttention-2, made for 8.0: on an H100 tiles of a ring reach 325 to 347 TFLOP/s with it and 562 to 598 with cuDNN,
# backward 300 to 320 and 537 to 548 (docs/cuda.md). On 8.x and 12.0 cuDNN is no faster (transformers PR 48163); on a
# B200 a step was 12 % faster with it (torchtitan PR 1196). cuDNN needs about a second to build a plan for every new
# length and has no window, so packed documents and windows stay with flash.
PREFERRED = {9: "cudnn", 10: "cudnn"}

# The most dims of a head that flash takes, and cuDNN half as many. For wider ones (the full attention of Gemma 4 has
# 512) `auto` takes efficient, which is made for 8.0 too. On an H200 it reaches 119 to 135 TFLOP/s forward and 42 to 47
# backward at 512 (docs/bench/README.md of xlite-dev/ffpa-attn, 2026).
WIDEST_FAST = flash.KERNEL.head_dims[-1]


def check_kernel(name: str) -> str:
    """Return `name`, or raise PlanError unless it is `auto` or a registered kernel."""
    return check_name("attention kernel", name, ("auto", *KERNELS))


def choose_kernel(name: str, q: Tensor, v: Tensor, **options: bool) -> Kernel:
    """The kernel `name`, or for "auto" the first that can run these tensors.

    Args:
        options: `softcap`, whether scores are capped, and `dense`, whether all tiles are full or causal.

    Raises:
        PlanError: the kernel cannot run them; the message says why and which can.
    """
    # Fake CUDA tensors may exist without a GPU, and ROCm numbers capabilities differently.
    has_capability = q.is_cuda and torch.cuda.is_available() and not torch.version.hip
    capability = torch.cuda.get_device_capability(q.device) if has_capability else None
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    case = Case(q.device.type, q.dtype, q.shape[-1], v.shape[-1], capability=capability, **options)
    return KERNELS[choose_for_case(name, case)]


@lru_cache(maxsize=256)
def choose_for_case(name: str, case: Case) -> str:
    """The name of the kernel that `choose_kernel` takes for a case."""
    refusals = {other: kernel.refusal(case) for other, kernel in KERNELS.items()}
    preferred = PREFERRED.get(case.capability[0]) if case.capability and case.dense else None
    able = [other for other in sorted(KERNELS, key=lambda other: other != preferred) if not refusals[other]]
    if name == "auto" and able:
        where = case.device
        if case.capability:
            tiles = "full and causal tiles" if case.dense else "windows or packed documents"
            where += " {}.{}, the first that can for {}".format(*case.capability, tiles)
        if case.device == "cuda" and (dims := max(case.qk_dim, case.v_dim)) > WIDEST_FAST:
            where += (
                f"; heads of {dims} dims are more than the {WIDEST_FAST} of the fast kernels: on an H200 it reaches an "
                "eighth of the peak forward and a twentieth backward"
            )
        logger.info("attention kernel %s for %s on %s", able[0], str(case.dtype).removeprefix("torch."), where)
        logger.debug("other kernels: %s", "; ".join(f"{other}: {why}" for other, why in refusals.items() if why))
        return able[0]
    if name in able:
        return name
    raise PlanError(
        f"attention kernel {name!r} cannot run this: {refusals.get(name) or refusals['reference']}",
        fix=f"use {' or '.join(able)}" if able else "change what the message names",
    )


__all__ = ["KERNELS", "WIDEST_FAST", "Case", "Kernel", "ScoreMod", "check_kernel", "choose_for_case", "choose_kernel"]
