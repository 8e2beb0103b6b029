"""Attention across ranks as one operator of torch.library, for eager and compiled code alike."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import CustomOpDef

from torchtitan_cp.attention.autograd import Context
from torchtitan_cp.attention.caching import keep_newest
from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.kernels import KERNELS, ScoreMod, choose_kernel
from torchtitan_cp.attention.mask import count_rows
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.plan_registry import find_plan
from torchtitan_cp.attention.strategies import STRATEGIES, log_choice
from torchtitan_cp.attention.strategies.all_to_all import share_heads
from torchtitan_cp.attention.strategies.strategy import Call, Residuals, Strategy

P = ParamSpec("P")
Result = TypeVar("Result")


@keep_newest
def with_exchange(plan: Plan, all_to_all_ranks: int) -> Plan:
    """The plan with the strategy that an attention decided on where the plan has `auto`.

    Args:
        all_to_all_ranks: what `ranks_trading_heads` said.
    """
    if plan.strategy != "auto":
        return plan
    return replace(plan, strategy="all_to_all" if all_to_all_ranks > 1 else "ring", all_to_all_ranks=all_to_all_ranks)


def prepare_plan(plan: Plan) -> None:
    """Work out a plan's tiles, and what the kernel that it names needs on the host, before the first attention.

    A loader's thread calls this; what it does not do, attention does. Equal plans share the work.
    """
    queries, rows = plan.local_tokens * plan.all_to_all_ranks, len(plan.mask.documents(plan.sequence_length))
    steps = [(step.tiles, count_rows(step.receive)) for step in plan.steps]
    strategy = STRATEGIES.get(plan.strategy)  # none for `auto`, which never chooses one that gathers keys
    if strategy and strategy.gathers_keys:
        steps = [(plan.gathered_tiles, plan.sequence_length)]
    kernel = KERNELS.get(plan.kernel)
    for tiles, keys in steps:
        if kernel and kernel.prepare and tiles:
            kernel.prepare(tiles, rows, queries, keys)


def _make_call(
    planned: Plan,
    q: Tensor,
    v: Tensor,
    heads: tuple[int, int],
    scores: ScoreMod,
    sinks: Tensor | None,
    trading: int,
    *,
    backward: bool = False,
) -> tuple[Strategy, Call]:
    """The strategy of an attention, and its call.

    Args:
        heads: (query, key); trading: ranks that trade heads; backward: whether the call is for the backward.
    """
    plan = with_exchange(planned, trading)
    if plan is not planned and plan.kv_transfer == "exact":
        log_choice(plan.strategy, *heads, plan.ranks, plan.mask.band)
    plan.check_batch(len(q))
    options = {"softcap": scores.softcap > 0, "dense": plan.mask.dense, "backward": backward}
    kernel = choose_kernel(plan.kernel, q, v, **options)
    return STRATEGIES[plan.strategy], Call(plan, kernel, scores, heads[1], *plan.process_groups, sinks)


def _with_unit_stride(x: Tensor) -> Tensor:
    """`x` with stride 1 in its last dim, which kernels rely on; aten's CPU kernel does not check it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_scale(scale: float | Tensor | None) -> None:
    """Raise PlanError if a scale is a tensor that requires grad: operators take a number, and give it no gradient."""
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise PlanError("the scale requires grad, and would get none", fix="multiply q by it, and give scale = 1.0")


def operator(name: str) -> Callable[[Callable[P, Result]], CustomOpDef]:
    """Make a function an operator of torch.library. Autocast does not change its dtypes."""

    def register(function: Callable[P, Result]) -> CustomOpDef:
        @wraps(function)
        def run(*arguments: P.args, **named: P.kwargs) -> Result:
            if forward_ad._current_level >= 0:  # torch.library would drop the tangents silently
                raise PlanError(f"{name} has no forward-mode derivative", fix="use reverse mode, such as backward()")
            with torch._C._DisableAutocast():
                return function(*arguments, **named)

        # A replayed CUDA graph would run the plan that it was recorded with, since Python looks up the plan.
        tags = [torch.Tag.cudagraph_unsafe]
        return torch.library.custom_op(f"torchtitan_cp::{name}", run, mutates_args=(), tags=tags)

    return register


def _new_outputs(q: Tensor, k: Tensor, v: Tensor, all_to_all_ranks: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What `attention` returns, by shape and dtype."""
    all_to_all_ranks = int(all_to_all_ranks)  # torch.compile makes it symbolic once it has changed
    (batch, rows, heads, _), lse_dtype = q.shape, accumulation_dtype(q.dtype)
    out = q.new_empty((batch, rows, heads, v.shape[-1]))
    lse = q.new_empty((batch, rows, heads), dtype=lse_dtype)
    if all_to_all_ranks == 1:
        return out, lse, []
    shares = share_heads(int(heads), int(k.shape[2]), all_to_all_ranks)
    rows, query_heads, key_heads = rows * all_to_all_ranks, len(shares.queries[0]), len(shares.keys[0])
    q_all, out_all = (q.new_empty((batch, rows, query_heads, x.shape[-1])) for x in (q, v))
    k_all, v_all = (q.new_empty((batch, rows, key_heads, x.shape[-1])) for x in (k, v))
    return out, lse, [q_all, k_all, v_all, out_all, q.new_empty((batch, rows, query_heads), dtype=lse_dtype)]


def _new_gradients(
    dout: Tensor, residuals: list[Tensor], sinks: Tensor | None, key_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `attention_backward` returns, by shape and dtype."""
    (batch, rows, heads, v_dim), qk_dim = dout.shape, residuals[0].shape[-1]
    shapes = ((heads, qk_dim), (key_heads, qk_dim), (key_heads, v_dim))
    dq, dk, dv = (dout.new_empty((batch, rows, *shape)) for shape in shapes)
    return dq, dk, dv, dout.new_empty(0) if sinks is None else torch.zeros_like(sinks)


@operator("attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor,
    scale: float,
    softcap: float,
    all_to_all_ranks: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out `[B, S/P, Hq, Dv]`, lse `[B, S/P, Hq]`, the residuals of an all-to-all of `all_to_all_ranks`)."""
    if not len(q):  # which some kernels refuse
        return _new_outputs(q, k, v, all_to_all_ranks)
    q, k, v = map(_with_unit_stride, (q, k, v))
    heads, scores = (q.shape[2], k.shape[2]), ScoreMod(scale, softcap)
    strategy, call = _make_call(find_plan(handle), q, v, heads, scores, sinks, all_to_all_ranks)
    out, lse, residuals = strategy.forward(q, k, v, call)
    return out, lse, [] if all_to_all_ranks == 1 else list(residuals)


@operator("attention_backward")
def attention_backward(
    dout: Tensor,
    residuals: list[Tensor],
    sinks: Tensor | None,
    handle: Tensor,
    scale: float,
    softcap: float,
    all_to_all_ranks: int,
    key_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks); dsinks is empty without sinks."""
    if not len(dout):
        return _new_gradients(dout, residuals, sinks, key_heads)
    dout, q, k, v, out = map(_with_unit_stride, (dout, *residuals[:4]))
    heads, scores = (dout.shape[2], key_heads), ScoreMod(scale, softcap)
    strategy, call = _make_call(find_plan(handle), q, v, heads, scores, sinks, all_to_all_ranks, backward=True)
    *gradients, dsinks = strategy.backward(dout, Residuals(q, k, v, out, residuals[4]), call)
    # Compiled code relies on the strides that `_new_gradients` promises.
    dq, dk, dv = (gradient.contiguous() for gradient in gradients)
    return dq, dk, dv, dout.new_empty(0) if sinks is None or dsinks is None else dsinks.to(sinks.dtype)


class _Context(Context, Protocol):
    scale: float
    softcap: float
    all_to_all_ranks: int
    key_heads: int


def _save_for_backward(
    ctx: _Context,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, float, float, int],
    output: tuple[Tensor, Tensor, list[Tensor]],
) -> None:
    q, k, v, sinks, handle, ctx.scale, ctx.softcap, ctx.all_to_all_ranks = inputs
    out, lse, residuals = output
    ctx.key_heads = k.shape[2]
    ctx.save_for_backward(handle, sinks, *(residuals or (q, k, v, out, lse)))


def _backward(ctx: _Context, dout: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    handle, sinks, *residuals = ctx.saved_tensors
    dq, dk, dv, dsinks = torch.ops.torchtitan_cp.attention_backward(
        dout, residuals, sinks, handle, ctx.scale, ctx.softcap, ctx.all_to_all_ranks, ctx.key_heads
    )
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None


attention.register_fake(lambda q, k, v, *options: _new_outputs(q, k, v, options[-1]))
attention_backward.register_fake(
    lambda dout, residuals, sinks, *options: _new_gradients(dout, residuals, sinks, options[-1])
)
attention.register_autograd(_backward, setup_context=_save_for_backward)

OPERATOR = torch.ops.torchtitan_cp.attention.default
