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
from torchtitan_cp.attention.kernels import cpu, cudnn, efficient, flash, flash4, flex, reference
from torchtitan_cp.attention.kernels.kernel import Case, Kernel, ScoreMod
from torchtitan_cp.attention.kernels.rates import Rate, find_rate

logger = logging.getLogger(__name__)

# `auto` takes the kernel that is fastest by RATES, and where none has a rate the first in this order. flash is first,
# as it takes windows, packed documents and grouped heads as they are. flash4 is taken for its rates only; reference is
# last, since it holds every score in memory.
KERNELS: dict[str, Kernel] = {
    "flash": flash.KERNEL,
    "cudnn": cudnn.KERNEL,
    "efficient": efficient.KERNEL,
    "cpu": cpu.KERNEL,
    "flex": flex.KERNEL,
    "flash4": flash4.KERNEL,
    "reference": reference.KERNEL,
}

# The most dims of a head that flash takes, and cuDNN half as many. For wider ones (the full attention of Gemma 4 has
# 512) `auto` takes efficient, which is made for 8.0 too.
WIDEST_FAST = flash.KERNEL.head_dims[-1]


def check_kernel(name: str) -> str:
    """Return `name`, or raise PlanError unless it is `auto` or a registered kernel."""
    return check_name("attention kernel", name, ("auto", *KERNELS))


def choose_kernel(name: str, q: Tensor, v: Tensor, **options: bool) -> Kernel:
    """The kernel `name`, or for "auto" the fastest that can run these tensors.

    Args:
        options: `softcap`, whether scores are capped; `dense`, whether all tiles are full or causal; `backward`,
            whether the kernel is for the backward, which may be another than the forward's.

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
    able = [other for other in KERNELS if not refusals[other]]
    known = [other for other in able if not (case.planned and KERNELS[other].missing)]
    if name == "auto" and known:
        chosen = _fastest(known, case)
        if not case.backward or chosen != choose_for_case(name, case._replace(backward=False)):
            _log_choice(chosen, case)
            logger.debug("other kernels: %s", "; ".join(f"{other}: {why}" for other, why in refusals.items() if why))
        return chosen
    if name in able:
        return name
    raise PlanError(
        f"attention kernel {name!r} cannot run this: {refusals.get(name) or refusals['reference']}",
        fix=f"use {' or '.join(able)}" if able else "change what the message names",
    )


def rate_of(kernel: str, case: Case) -> Rate | None:
    """The rate of a kernel in a case; None with a soft cap, as no kernel's rate with one is known."""
    return None if case.softcap else find_rate(kernel, case.capability, max(case.qk_dim, case.v_dim), case.dense)


def _fastest(names: list[str], case: Case) -> str:
    """The fastest of some kernels in the case's direction; of those without a rate, the first."""

    def speed(name: str) -> float:
        rate = rate_of(name, case)
        return 0.0 if rate is None else rate.backward if case.backward else rate.forward

    return max(names, key=speed)


def _log_choice(chosen: str, case: Case) -> None:
    """Say in one line which kernel `auto` takes and for what, and which package would give a faster one."""
    where = case.device
    direction = "the backward of " if case.backward else ""
    work = direction + ("full and causal tiles" if case.dense else "windows or packed documents")
    if case.capability:
        reason = "fastest" if rate_of(chosen, case) else "first"
        where += " {}.{}, the {} that can run {}".format(*case.capability, reason, work)
    else:
        where += f", for {work}"
    if case.device == "cuda" and (dims := max(case.qk_dim, case.v_dim)) > WIDEST_FAST:
        where += (
            f"; heads of {dims} dims are more than the {WIDEST_FAST} of the fast kernels: on an H200 it reaches an "
            "eighth of the peak forward and a twentieth backward"
        )
    lacks = flash4.missing()
    if lacks and lacks == KERNELS["flash4"].refusal(case) and _fastest([chosen, "flash4"], case) == "flash4":
        where += f"; flash4 would be faster, but {lacks}"
    logger.info("attention kernel %s for %s on %s", chosen, str(case.dtype).removeprefix("torch."), where)


__all__ = [
    "KERNELS",
    "WIDEST_FAST",
    "Case",
    "Kernel",
    "ScoreMod",
    "check_kernel",
    "choose_for_case",
    "choose_kernel",
    "rate_of",
]
