"""Attention across ranks as one operator of torch.library: eager and compiled code take the same way."""

import logging
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchtitan_cp.attention.collectives import Groups, find_groups
from torchtitan_cp.attention.kernels import choose_kernel
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import wide
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.plan_registry import KEPT_PLANS, plan_of
from torchtitan_cp.attention.strategies import STRATEGIES, Call, Residuals, choose_strategy, explain_strategy
from torchtitan_cp.attention.strategies.all_to_all import share_heads

logger = logging.getLogger(__name__)


@lru_cache(maxsize=KEPT_PLANS)
def resolved(plan: Plan, strategy: str) -> Plan:
    """A plan of strategy `auto` with the strategy that the heads made of it."""
    if plan.strategy == strategy:
        return plan
    if strategy != "all_to_all":
        return replace(plan, strategy=strategy)
    groups = Groups(None, plan.groups.ring) if plan.groups else None
    return replace(plan, strategy=strategy, all_to_all_ranks=plan.ranks, groups=groups)


@lru_cache(maxsize=256)
def _announce(query_heads: int, key_heads: int, ranks: int, band: Band) -> None:
    """Say once what `auto` chose, and why."""
    case = (query_heads, key_heads, ranks, band)
    logger.info("attention strategy %s on %d ranks: %s", choose_strategy(*case), ranks, explain_strategy(*case))


def _call(
    plan: Plan, q: Tensor, v: Tensor, key_heads: int, slopes: Tensor | None, scale: float, softcap: float
) -> Call:
    ring, trade = find_groups(plan.groups, plan.ranks, plan.all_to_all_ranks)
    return Call(
        plan=plan,
        kernel=choose_kernel(plan.kernel, q, v, softcap, slopes is not None),
        scale=scale,
        key_heads=key_heads,
        ring=ring,
        trade=trade,
        slopes=slopes,
    )


# A CUDA graph that is replayed would run the plan it was recorded with: the plan is found in Python, by its number.
UNSAFE = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("torchtitan_cp::attention", mutates_args=(), tags=UNSAFE)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    handle: Tensor,
    scale: float,
    softcap: float,
    strategy: str,
    trade_ranks: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out `[B, S/P, Hq, Dv]`, lse `[B, S/P, Hq]`, what an all-to-all of `trade_ranks` made and keeps)."""
    plan = plan_of(handle)
    if plan.strategy == "auto":
        _announce(q.shape[2], k.shape[2], plan.ranks, plan.mask.band)
    call = _call(resolved(plan, strategy), q, v, k.shape[2], slopes, scale, softcap)
    out, lse, residuals = STRATEGIES[strategy].forward(q, k, v, sinks, call)
    if trade_ranks == 1:
        return out, lse, []
    return out, lse, list(residuals)


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    handle: Tensor,
    scale: float,
    softcap: float,
    strategy: str,
    trade_ranks: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    batch, rows, heads, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[-1]))
    lse = q.new_empty((batch, rows, heads), dtype=wide(q.dtype))
    if trade_ranks == 1:
        return out, lse, []
    shares = share_heads(heads, k.shape[2], trade_ranks)
    rows = rows * trade_ranks
    kept = [
        q.new_empty((batch, rows, shares.share, q.shape[-1])),
        q.new_empty((batch, rows, len(shares.keys[0]), q.shape[-1])),
        q.new_empty((batch, rows, len(shares.keys[0]), v.shape[-1])),
        q.new_empty((batch, rows, shares.share, v.shape[-1])),
        q.new_empty((batch, rows, shares.share), dtype=wide(q.dtype)),
    ]
    return out, lse, kept


@torch.library.custom_op("torchtitan_cp::attention_backward", mutates_args=(), tags=UNSAFE)
def attention_backward(
    dout: Tensor,
    residuals: list[Tensor],
    sinks: Tensor | None,
    slopes: Tensor | None,
    handle: Tensor,
    scale: float,
    softcap: float,
    strategy: str,
    key_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks); dsinks is empty without sinks."""
    kept = Residuals(*residuals)
    call = _call(resolved(plan_of(handle), strategy), kept.q, kept.v, key_heads, slopes, scale, softcap)
    *gradients, dsinks = STRATEGIES[strategy].backward(dout, kept, sinks, call)
    # Compiled code counts on the strides that the fake kernel promises.
    dq, dk, dv = (gradient.contiguous() for gradient in gradients)
    if sinks is None or dsinks is None:
        return dq, dk, dv, dout.new_empty(0)
    return dq, dk, dv, dsinks.to(sinks.dtype)


@attention_backward.register_fake
def _(
    dout: Tensor,
    residuals: list[Tensor],
    sinks: Tensor | None,
    slopes: Tensor | None,
    handle: Tensor,
    scale: float,
    softcap: float,
    strategy: str,
    key_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, rows, heads, v_dim = dout.shape
    qk_dim = residuals[0].shape[-1]
    return (
        dout.new_empty((batch, rows, heads, qk_dim)),
        dout.new_empty((batch, rows, key_heads, qk_dim)),
        dout.new_empty((batch, rows, key_heads, v_dim)),
        dout.new_empty(0) if sinks is None else torch.empty_like(sinks),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, sinks, slopes, handle, ctx.scale, ctx.softcap, ctx.strategy, _ = inputs
    out, lse, kept = output
    ctx.key_heads = k.shape[2]
    ctx.save_for_backward(handle, sinks, slopes, *(kept or (q, k, v, out, lse)))


def _differentiate(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    handle, sinks, slopes, *residuals = ctx.saved_tensors
    dq, dk, dv, dsinks = torch.ops.torchtitan_cp.attention_backward(
        dout, residuals, sinks, slopes, handle, ctx.scale, ctx.softcap, ctx.strategy, ctx.key_heads
    )
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None, None, None


attention.register_autograd(_differentiate, setup_context=_keep)

# What a policy of selective activation checkpointing compares with, to keep an attention instead of running it again.
OPERATOR = torch.ops.torchtitan_cp.attention.default
