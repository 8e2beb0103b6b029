"""The gated delta rule across ranks as an operator of torch.library, like attention: by the number of a plan.

Strategy `state` computes all heads of a rank's rows, and passes states between ranks. Strategy `all_to_all` trades
heads for sequence, and computes some heads of all rows. Backward makes a chunk's factors again; what it keeps
besides the inputs are the states that enter a rank's runs, or what it received in trade.
"""

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchtitan_cp.attention.compiling import above_autograd
from torchtitan_cp.attention.errors import PlanError, check_name
from torchtitan_cp.attention.linear.chunks import (
    CHUNK,
    Factors,
    Inputs,
    chunk_gradients,
    chunk_outputs,
    chunk_states,
    factor_gradients,
    make_factors,
)
from torchtitan_cp.attention.linear.rows import ChunkRows, chunk_rows, whole_sequence
from torchtitan_cp.attention.linear.states import StateExchange, cp_group, most_maps
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.operator import UNSAFE
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.plan_registry import find_plan
from torchtitan_cp.attention.strategies.all_to_all import (
    group_rows,
    join_heads,
    join_rows,
    share_heads,
    split_heads,
    split_rows,
    trade,
)

logger = logging.getLogger(__name__)

STRATEGIES = ("auto", "state", "all_to_all")


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: Plan,
    scale: float | None = None,
    qk_l2norm: bool = False,
    strategy: str = "auto",
) -> Tensor:
    """The gated delta rule over the full sequence, differentiable. Collective over the plan's group.

    With a state S `[K, V]` of zeros at the start of each document, a token does S <- e^g S (each row by its own gate
    for KDA), S <- S + beta k (v - S^T k)^T, and its output is scale S^T q.

    Args:
        q, k: `[B, S/P, Hk, K]`.
        v: `[B, S/P, Hv, V]` of the same dtype; Hv is a multiple of Hk, and consecutive value heads share a key head.
        g: `[B, S/P, Hv]` log gates, at most 0 (gated delta net); or `[B, S/P, Hv, K]` (Kimi delta attention).
        beta: `[B, S/P, Hv]`, usually 0 to 1, or to 2.
        plan: this rank's, of any layout and packing; its mask is causal and has no window.
        scale: default K ** -0.5.
        qk_l2norm: divide each head's query and key by their L2 norm first. Without it, keys should have norms of about
            1: the state may grow without bound otherwise.
        strategy: "state" passes states between ranks; "all_to_all" trades heads; "auto" takes what sends less, and
            the log says why.

    Returns:
        `[B, S/P, Hv, V]` in v's dtype; rows of padding are zero. Sums are fp32 (fp64 for fp64).

    Raises:
        PlanError: shapes or dtypes do not fit the plan or each other; a window, a mask that is not causal, or a mesh of
            two axes, which the rule does not have; an unknown strategy.
    """
    check_name("strategy of linear attention", strategy, STRATEGIES)
    check_mask(plan)
    g = g if g.ndim == 4 else g.unsqueeze(-1)
    _check_shapes(q, k, v, g, beta, plan)
    # Gates travel beside the queries as columns of their dtype.
    g, beta = (x.to(torch.promote_types(x.dtype, q.dtype)) for x in (g, beta.unsqueeze(-1)))
    trades = strategy == "all_to_all" or (strategy == "auto" and _choose(q, v, g, plan) == "all_to_all")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = scale, qk_l2norm, plan.ranks, trades and plan.ranks > 1, plan.most_runs
    return delta_rule(q, k, v, g, beta, plan.handle, *options)[0]


def check_mask(plan: Plan) -> None:
    """Raise PlanError if a plan's mask is one that a state does not have."""
    if not plan.mask.causal or plan.mask.window[0] >= 0:
        raise PlanError(
            "linear attention and convolutions are causal and have no window, and the plan's mask is not so",
            fix="give them a plan of a mask with the documents alone, made with `like` the other layers' plan",
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: Plan) -> None:
    shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)))
    if not q.ndim == k.ndim == v.ndim == g.ndim == 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise PlanError(
            f"q and k are [B, S/P, Hk, K], v is [B, S/P, Hv, V] and g [B, S/P, Hv] or [.., K], got {shapes}"
        )
    if q.shape[1] != plan.local_tokens:
        raise PlanError(f"the plan holds {plan.local_tokens} tokens a rank, got {shapes}", fix="shard with plan.shard")
    if g.shape[:3] != v.shape[:3] or beta.shape != v.shape[:3] or g.shape[3] not in (1, q.shape[3]):
        raise PlanError(f"heads or dims do not match: {shapes}", fix="g and beta have one number per value head")
    if v.shape[2] % q.shape[2]:
        raise PlanError(f"Hv is not a multiple of Hk: {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise PlanError(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}", fix="cast them to one")
    rows = plan.mask.document_lengths
    if rows is not None and len(rows) not in (1, q.shape[0]):
        raise PlanError(f"the mask has documents of {len(rows)} batch rows and q has {q.shape[0]}")


def volumes(q: Tensor, v: Tensor, g: Tensor, plan: Plan) -> tuple[int, int]:
    """Bytes that a rank sends forward and backward, by (state, all_to_all), times P / (P - 1).

    Forward, a run sends A and B and gets a state; backward, it sends and gets one. At most: a document that begins or
    ends in a run needs less.
    """
    (_, tokens, key_heads, key_dim), (_, _, heads, value_dim) = q.shape, v.shape
    a_run = heads * key_dim * (key_dim + 4 * value_dim) * accumulation_dtype(q.dtype).itemsize
    a_token = (
        2 * (key_heads * key_dim + heads * value_dim) * q.dtype.itemsize + heads * (g.shape[-1] + 1) * g.dtype.itemsize
    )
    return plan.most_runs * a_run, 2 * tokens * a_token


def _choose(q: Tensor, v: Tensor, g: Tensor, plan: Plan) -> str:
    """The strategy that `auto` takes: states, unless heads divide and trading them carries less."""
    # torch.compile traces this function with sizes it may not know, so it must not format text.
    if q.shape[2] % plan.ranks or v.shape[2] % plan.ranks:
        return "state"
    state, all_to_all = volumes(q, v, g, plan)
    return "state" if state <= all_to_all else "all_to_all"


@lru_cache(maxsize=256)
def _log_choice(strategy: str, ranks: int, heads: tuple[int, int], megabytes: tuple[int, int]) -> None:
    logger.info(
        "linear attention on %d ranks: strategy %s; %d value and %d key heads; forward and backward states send up to "
        "%d MiB a rank, and heads in trade (if they divide) %d MiB",
        ranks, strategy, *heads, *megabytes,
    )  # fmt: skip


def _in_chunks(inputs: Inputs, rows: ChunkRows) -> Inputs:
    """In the dtype of sums; a document's first token forgets all before it."""
    dtype = accumulation_dtype(inputs.q.dtype)
    q, k, v, g, beta = (rows.split(x.to(dtype), inputs.q.shape[2]) for x in inputs)
    begins = rows.begins.unflatten(1, (-1, CHUNK)).transpose(0, 1)[:, :, None, None, :, None]
    return Inputs(q, k, v, g.masked_fill(begins, float("-inf")), beta)


def _forward(inputs: Inputs, plan: Plan, scale: float, qk_l2norm: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(out, the states that enter the runs, the maps that were composed) of this rank's rows."""
    rows = chunk_rows(plan, inputs.q.device)
    factors = make_factors(_in_chunks(inputs, rows), scale, qk_l2norm)
    entering, maps = StateExchange(plan, rows, factors).enter()
    states, _ = chunk_states(factors, _at_runs(entering, rows, 0))
    return rows.join(chunk_outputs(factors, states)).to(inputs.v.dtype), entering, maps


def _backward(
    dout: Tensor, inputs: Inputs, entering: Tensor, maps: Tensor, plan: Plan, scale: float, qk_l2norm: bool
) -> list[Tensor]:
    """The gradients of the inputs, in their dtypes."""
    rows = chunk_rows(plan, dout.device)
    leaves = Inputs(*(x.requires_grad_() for x in _in_chunks(inputs, rows)))
    with above_autograd(), torch.enable_grad():
        made = make_factors(leaves, scale, qk_l2norm)
    factors = Factors(*(x.detach() for x in made))
    dout_chunks = rows.split(dout.to(factors.u.dtype), inputs.q.shape[2])
    states, _ = chunk_states(factors, _at_runs(entering, rows, 0))
    leaving = StateExchange(plan, rows, factors).leave(dout_chunks, maps)
    dstates, _ = chunk_gradients(factors, dout_chunks, _at_runs(leaving, rows, -1))
    dfactors = factor_gradients(factors, states, dout_chunks, dstates)
    with above_autograd():
        gradients = torch.autograd.grad(made, leaves, dfactors)
    return [rows.join(gradient).to(x.dtype) for gradient, x in zip(gradients, inputs, strict=True)]


def _at_runs(states: Tensor, rows: ChunkRows, end: int) -> dict[int, Tensor]:
    """Chunk -> state, for the first (0) or the last (-1) chunk of each run."""
    return {run[0] if end == 0 else run[1] - 1: state for run, state in zip(rows.runs, states, strict=False)}


def _trade_inputs(inputs: Inputs, plan: Plan) -> Inputs:
    """Some heads of the full sequence, `[B, S, h, ..]`, for those of this rank's rows."""
    group, dtype = cp_group(plan), inputs.q.dtype
    heads = share_heads(inputs.v.shape[2], inputs.q.shape[2], group.ranks)
    columns = [x if x.dtype == dtype else x.contiguous().view(dtype) for x in inputs]
    held = (heads.keys, heads.keys, heads.queries, heads.queries, heads.queries)
    arrived = trade([split_heads(x, of_rank) for x, of_rank in zip(columns, held, strict=True)], group)
    rows = group_rows(plan, group)
    return Inputs(*(join_rows(parts, rows).view(x.dtype) for parts, x in zip(arrived, inputs, strict=True)))


def _trade_back(tensors: list[Tensor], heads: tuple[int, int], plan: Plan) -> list[Tensor]:
    """This rank's rows of all heads for the full sequence of some: (keys', keys', values' ..), or values' alone."""
    group = cp_group(plan)
    rows, shares = group_rows(plan, group), share_heads(*heads, group.ranks)
    dtype, dtypes = tensors[0].dtype, [x.dtype for x in tensors]
    arrived = trade([split_rows(x if x.dtype == dtype else x.view(dtype), rows) for x in tensors], group)
    held = [(shares.keys, heads[1])] * 2 if len(tensors) > 1 else []
    held += [(shares.queries, heads[0])] * (len(tensors) - len(held))
    joined = [join_heads(parts, *of_rank) for parts, of_rank in zip(arrived, held, strict=True)]
    return [x.view(dtype) for x, dtype in zip(joined, dtypes, strict=True)]


@torch.library.custom_op("torchtitan_cp::gated_delta_rule", mutates_args=(), tags=UNSAFE)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    handle: Tensor,
    scale: float,
    qk_l2norm: bool,
    ranks: int,
    trades: bool,
    most_runs: int,
) -> tuple[Tensor, list[Tensor]]:
    """(out `[B, S/P, Hv, V]`, what the backward needs besides or instead of the inputs)."""
    plan, inputs = find_plan(handle), Inputs(q, k, v, g, beta)
    heads = v.shape[2], q.shape[2]
    if plan.ranks > 1:
        megabytes = tuple(size >> 20 for size in volumes(q, v, g, plan))
        _log_choice("all_to_all" if trades else "state", plan.ranks, heads, megabytes)
    if not trades:
        out, *residuals = _forward(inputs, plan, scale, qk_l2norm)
        return out.contiguous(), residuals
    traded = _trade_inputs(inputs, plan)
    out, *_ = _forward(traded, whole_sequence(plan), scale, qk_l2norm)
    return _trade_back([out], heads, plan)[0].contiguous(), list(traded)


@delta_rule.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, handle: Tensor, *options: Any
) -> tuple[Tensor, list[Tensor]]:
    *_, ranks, trades, most_runs = options
    (batch, rows, heads, value_dim), (key_heads, key_dim) = v.shape, q.shape[2:]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if trades:
        shares = share_heads(heads, key_heads, ranks)
        held = [len(shares.keys[0])] * 2 + [len(shares.queries[0])] * 3
        traded = zip((q, k, v, g, beta), held, strict=True)
        return out, [x.new_empty((batch, rows * ranks, of_rank, x.shape[-1])) for x, of_rank in traded]
    dtype, maps = accumulation_dtype(q.dtype), batch * most_maps(ranks, most_runs, heads)
    entering = q.new_empty((most_runs, batch, heads, key_dim, value_dim), dtype=dtype)
    return out, [entering, q.new_empty(maps * key_dim * key_dim, dtype=dtype)]


@torch.library.custom_op("torchtitan_cp::gated_delta_rule_backward", mutates_args=(), tags=UNSAFE)
def delta_rule_backward(
    dout: Tensor, kept: list[Tensor], handle: Tensor, key_heads: int, scale: float, qk_l2norm: bool, trades: bool
) -> list[Tensor]:
    """Gradients of q, k, v, g, beta, which are kept with the residuals, or are the residuals where heads are traded."""
    plan, inputs = find_plan(handle), Inputs(*kept[:5])
    if not trades:
        gradients = _backward(dout, inputs, kept[5], kept[6], plan, scale, qk_l2norm)
    else:
        heads, group = (dout.shape[2], key_heads), cp_group(plan)
        arrived = trade([split_heads(dout, share_heads(*heads, group.ranks).queries)], group)[0]
        dout_rows, none = join_rows(arrived, group_rows(plan, group)), dout.new_empty(0)
        gradients = _backward(dout_rows, inputs, none, none, whole_sequence(plan), scale, qk_l2norm)
        gradients = _trade_back(gradients, heads, plan)
    return [gradient.contiguous() for gradient in gradients]


@delta_rule_backward.register_fake
def _(
    dout: Tensor, kept: list[Tensor], handle: Tensor, key_heads: int, scale: float, qk_l2norm: bool, trades: bool
) -> list[Tensor]:
    batch, rows, heads, _ = dout.shape
    held = (key_heads, key_heads, heads, heads, heads)
    return [x.new_empty((batch, rows, h, x.shape[-1])) for x, h in zip(kept[:5], held, strict=True)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    *tensors, handle, ctx.scale, ctx.qk_l2norm, _, ctx.trades, _ = inputs
    ctx.key_heads = tensors[0].shape[2]
    ctx.save_for_backward(handle, *([] if ctx.trades else tensors), *output[1])


def _autograd(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    handle, *kept = ctx.saved_tensors
    options = ctx.key_heads, ctx.scale, ctx.qk_l2norm, ctx.trades
    gradients = torch.ops.torchtitan_cp.gated_delta_rule_backward(dout, kept, handle, *options)
    return *gradients, None, None, None, None, None, None


delta_rule.register_autograd(_autograd, setup_context=_save_for_backward)

DELTA_RULE = torch.ops.torchtitan_cp.gated_delta_rule.default
