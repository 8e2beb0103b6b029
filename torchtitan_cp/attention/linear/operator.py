"""The gated delta rule across ranks as an operator of torch.library, which like attention finds its plan by number.

Strategy `state` computes all heads of a rank's rows, and passes states between ranks. Strategy `all_to_all` trades
heads for sequence, and computes some heads of all rows. For backward, which computes the factors of chunks again,
`state` keeps the inputs and the states that enter the runs, and `all_to_all` the inputs that it received.
"""

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from torchtitan_cp.attention.autograd import Context
from torchtitan_cp.attention.collectives import find_group
from torchtitan_cp.attention.errors import PlanError, check_name
from torchtitan_cp.attention.linear.kernel import in_parts
from torchtitan_cp.attention.linear.states import Inputs, StateExchange, map_columns, most_maps, whole_sequence
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.operator import check_scale, operator
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.plan_registry import find_plan
from torchtitan_cp.attention.strategies.all_to_all import HeadAllToAll, share_heads

logger = logging.getLogger(__name__)


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
    for KDA), S <- S + beta k (v - S^T k)^T, and its output is scale S^T q. Sources: Gated DeltaNet (Yang et al., 2024,
    arXiv:2412.06464) and Kimi Linear (2025).

    Args:
        q, k: `[B, S/P, Hk, K]`.
        v: `[B, S/P, Hv, V]` of the same dtype; Hv is a multiple of Hk, and consecutive value heads share a key head.
        g: `[B, S/P, Hv]` log gates, at most 0 (gated delta net); or `[B, S/P, Hv, K]` (Kimi delta attention).
        beta: `[B, S/P, Hv]`, usually 0 to 1, or to 2. beta and g may have another floating dtype than q, such as fp32.
        plan: this rank's, of any layout and packing; its mask is causal and has no window.
        scale: a number without a gradient; default K ** -0.5.
        qk_l2norm: divide each head's query and key by their L2 norm first. Without it, keys should have norms of about
            1: the state may grow without bound otherwise.
        strategy: "state" passes states between ranks; "all_to_all" trades heads; "auto" takes the one that sends less,
            and the log says why.

    Returns:
        `[B, S/P, Hv, V]` in v's dtype; rows of padding are zero. Sums are fp32 (fp64 for fp64).

    Raises:
        PlanError: shapes or dtypes do not fit the plan or each other; a window, a mask that is not causal, or a mesh of
            two axes without `whole_mesh`; an unknown strategy; a scale that requires grad.
    """
    check_scale(scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _call(Inputs(q, k, v, g, beta), plan, scale, "normalized_delta" if qk_l2norm else "delta", strategy)


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, plan: Plan, strategy: str = "auto"
) -> Tensor:
    """The scan of Mamba-2 over the full sequence, differentiable. Collective over the plan's group.

    With a state S `[N, D]` of zeros at the start of each document, a token does S <- e^(dt A) S + dt B x^T, and its
    output is S^T C. Source: Dao and Gu, Transformers are SSMs, 2024.

    Args:
        x: `[B, S/P, H, D]`.
        dt: `[B, S/P, H]` step sizes, above 0, after bias and softplus. dt and A may have another floating dtype than
            x, such as fp32.
        A: `[H]`, below 0. Its gradient comes from this rank's outputs only: sum it over the ranks.
        B, C: `[B, S/P, G, N]`; H is a multiple of G, and consecutive heads share a group. One dtype with x.
        plan: this rank's, of any layout and packing; its mask is causal and has no window.
        strategy: "state", "all_to_all", or "auto" for the one of them that sends less.

    Returns:
        `[B, S/P, H, D]` in x's dtype, without the skip D x; rows of padding are zero.

    Raises:
        PlanError: as `gated_delta_rule`.
    """
    fits = x.ndim == 4 and dt.shape == x.shape[:3] and A.shape == x.shape[2:3]
    check_inputs(plan, fits, "the scan takes x [B, S/P, H, D], dt [B, S/P, H], A [H]", {"x": x, "dt": dt, "A": A})
    # A gate rounded to 16 bits would be off at every token of a document.
    return _call(Inputs(C, B, x, dt.to(accumulation_dtype(dt.dtype)) * A, dt), plan, 1.0, "scan", strategy)


def _call(inputs: Inputs, plan: Plan, scale: float, rule: str, strategy: str) -> Tensor:
    check_name("strategy of linear attention", strategy, ("auto", "state", "all_to_all"))
    q, k, v, g, beta = inputs
    fits = q.ndim == v.ndim == 4 and q.shape == k.shape and (len(q), plan.local_tokens) == q.shape[:2] == v.shape[:2]
    fits = fits and beta.shape == v.shape[:3] and g.shape in (beta.shape, (*beta.shape, q.shape[-1]))
    takes = "the rule takes q, k [B, S/P, Hk, K], v [B, S/P, Hv, V], g [B, S/P, Hv] or [B, S/P, Hv, K], "
    takes += "beta [B, S/P, Hv], and Hv a multiple of Hk"
    check_inputs(plan, fits and v.shape[2] % q.shape[2] == 0, takes, inputs._asdict())
    if not q.dtype == k.dtype == v.dtype:
        raise PlanError(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}", fix="cast them to one")
    # Gates travel beside the queries as columns of their dtype.
    g, beta = (x.to(torch.promote_types(x.dtype, inputs.q.dtype)) for x in (inputs.g, inputs.beta.unsqueeze(-1)))
    inputs = inputs._replace(g=g if g.ndim == 4 else g.unsqueeze(-1), beta=beta)
    chosen = choose_strategy(inputs, plan, rule)[0] if strategy == "auto" else strategy
    trades = plan.ranks > 1 and chosen == "all_to_all"
    return delta_rule(list(inputs), plan.handle, scale, rule, plan.ranks, trades, plan.most_runs)[0]


def check_inputs(plan: Plan, fits: bool, takes: str, inputs: Mapping[str, Tensor]) -> None:
    """Raise PlanError if inputs do not fit, or the plan's mask is not causal or has a window.

    Args:
        fits: whether the inputs have the shapes that the operator takes.
        takes: those shapes, for the message.
    """
    if not fits:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in inputs.items())
        raise PlanError(f"{takes}, with S/P = {plan.local_tokens}, got {shapes}", fix="shard with plan.shard")
    if not plan.mask.causal or plan.mask.window[0] >= 0:
        raise PlanError(
            "linear attention and convolutions are causal and have no window, and the plan's mask is not so",
            fix="give them a plan whose mask has only the documents, made with `like` the other layers' plan",
        )


def choose_strategy(inputs: Inputs, plan: Plan, rule: str) -> tuple[str, int, int]:
    """The strategy that `auto` takes: trading heads if the key heads divide by the ranks and it sends less.

    Returns:
        (its name, bytes that a rank sends passing states, bytes that it sends trading heads), both before a factor
        (P - 1) / P. Forward, a run sends A and B and receives a state; backward, it sends and receives one. This is an
        upper bound, as a document that begins or ends in a run needs less.
    """
    # torch.compile may trace this function with symbolic sizes, so it must not format text.
    (_, tokens, key_heads, key_dim), (heads, value_dim) = inputs.q.shape, inputs.v.shape[2:]
    a_run = heads * key_dim * (map_columns(key_dim, rule) + 4 * value_dim) * accumulation_dtype(inputs.q.dtype).itemsize
    a_token = 2 * (key_heads * key_dim + heads * value_dim) * inputs.q.dtype.itemsize
    a_token += heads * (inputs.g.shape[-1] * inputs.g.dtype.itemsize + inputs.beta.dtype.itemsize)
    states, traded = plan.most_runs * a_run * len(inputs.q), 2 * tokens * a_token * len(inputs.q)
    return "all_to_all" if key_heads % plan.ranks == 0 and traded < states else "state", states, traded


@lru_cache(maxsize=256)
def _log_choice(strategy: str, ranks: int, heads: tuple[int, int], states: int, traded: int) -> None:
    why = f"{heads[0]} value and {heads[1]} key heads; forward and backward, states send up to {states >> 10:,} KiB "
    why += f"a rank, and trading heads (if they divide) {traded >> 10:,} KiB"
    logger.info("linear attention on %d ranks takes strategy %s: %s", ranks, strategy, why)


def _forward(inputs: Inputs, plan: Plan, scale: float, rule: str) -> tuple[Tensor, list[Tensor]]:
    """(out, [the states that enter the runs, the maps that were composed]) of this rank's rows."""
    run_parts = in_parts(inputs, plan, scale, rule)
    entering, maps = StateExchange(inputs, plan, rule).enter(
        lambda segments: run_parts(1, lambda kernel: [kernel.summarize(segment) for segment in segments])
    )
    (out,) = run_parts(2, lambda kernel, states: [kernel.outputs(states)], entering)
    return out.to(inputs.v.dtype), [entering, maps]


def _backward(dout: Tensor, kept: list[Tensor], plan: Plan, scale: float, rule: str) -> list[Tensor]:
    """The gradients of the inputs, in their dtypes.

    Args:
        kept: the inputs, and unless heads were traded, what `_forward` returned.
    """
    inputs, (entering, maps) = Inputs(*kept[:5]), kept[5:] or [dout.new_empty(0)] * 2
    run_parts = in_parts(inputs, plan, scale, rule, dout)
    leaving = StateExchange(inputs, plan, rule).leave(
        lambda segments: run_parts(1, lambda kernel: [kernel.gradient_inside(segment) for segment in segments]), maps
    )
    entering = entering if entering.numel() else torch.zeros_like(leaving)
    gradients = run_parts(2, lambda kernel, *states: kernel.gradients(*states), entering, leaving)
    return [x.to(y.dtype) for x, y in zip(gradients, inputs, strict=True)]


@operator("gated_delta_rule")
def delta_rule(
    inputs: list[Tensor], handle: Tensor, scale: float, rule: str, ranks: int, trades: bool, most_runs: int
) -> tuple[Tensor, list[Tensor]]:
    """(out `[B, S/P, Hv, V]`; what backward needs besides the inputs, or the traded inputs in place of them)."""
    plan, heads = find_plan(handle), (inputs[2].shape[2], inputs[0].shape[2])
    plan.check_batch(len(inputs[0]))
    if plan.ranks > 1:
        sent_bytes = choose_strategy(Inputs(*inputs), plan, rule)[1:]
        _log_choice("all_to_all" if trades else "state", plan.ranks, heads, *sent_bytes)
    if not trades:
        return _forward(Inputs(*inputs), plan, scale, rule)
    trade = HeadAllToAll(plan, find_group(plan.groups, ranks), *heads)
    traded = trade.to_heads(inputs, [trade.keys] * 2 + [trade.queries] * 3)
    return trade.to_rows([_forward(Inputs(*traded), whole_sequence(plan), scale, rule)[0]], [trade.queries])[0], traded


@delta_rule.register_fake
def _(
    inputs: list[Tensor], handle: Tensor, scale: float, rule: str, ranks: int, trades: bool, most_runs: int
) -> tuple[Tensor, list[Tensor]]:
    q, _, v, *_ = inputs
    (batch, rows, heads, value_dim), (key_heads, key_dim) = v.shape, q.shape[2:]
    out = v.new_empty(v.shape)
    if trades:
        shares = share_heads(int(heads), int(key_heads), ranks)
        heads_here = [len(shares.keys[0])] * 2 + [len(shares.queries[0])] * 3
        pairs = zip(inputs, heads_here, strict=True)
        return out, [x.new_empty((batch, rows * ranks, count, x.shape[-1])) for x, count in pairs]
    dtype, maps = accumulation_dtype(q.dtype), batch * most_maps(ranks, most_runs, heads)
    entering = q.new_empty((most_runs, batch, heads, key_dim, value_dim), dtype=dtype)
    return out, [entering, q.new_empty(maps * map_columns(key_dim, rule) * key_dim, dtype=dtype)]


@operator("gated_delta_rule_backward")
def delta_rule_backward(
    dout: Tensor, kept: list[Tensor], handle: Tensor, key_heads: int, scale: float, rule: str, trades: bool
) -> list[Tensor]:
    """Gradients of q, k, v, g, beta."""
    plan = find_plan(handle)
    if not trades:
        return _backward(dout, kept, plan, scale, rule)
    trade = HeadAllToAll(plan, find_group(plan.groups, plan.ranks), dout.shape[2], key_heads)
    (dout,) = trade.to_heads([dout], [trade.queries])
    gradients = _backward(dout, kept, whole_sequence(plan), scale, rule)
    return trade.to_rows(gradients, [trade.keys] * 2 + [trade.queries] * 3)


@delta_rule_backward.register_fake
def _(dout: Tensor, kept: list[Tensor], handle: Tensor, key_heads: int, *_: object) -> list[Tensor]:
    heads = [key_heads] * 2 + [dout.shape[2]] * 3
    return [x.new_empty((*dout.shape[:2], count, x.shape[-1])) for x, count in zip(kept[:5], heads, strict=True)]


class _Context(Context, Protocol):
    options: tuple[int, float, str, bool]  # key heads, scale, rule, whether heads are traded


def _save_for_backward(
    ctx: _Context, inputs: tuple[list[Tensor], Tensor, float, str, int, bool, int], output: tuple[Tensor, list[Tensor]]
) -> None:
    tensors, handle, scale, rule, _, trades, _ = inputs
    ctx.options = tensors[0].shape[2], scale, rule, trades
    ctx.save_for_backward(handle, *([] if trades else tensors), *output[1])


def _autograd(ctx: _Context, dout: Tensor, *_: object) -> tuple[list[Tensor] | None, ...]:
    handle, *kept = ctx.saved_tensors
    gradients = torch.ops.torchtitan_cp.gated_delta_rule_backward(dout, kept, handle, *ctx.options)
    return gradients, None, None, None, None, None, None


delta_rule.register_autograd(_autograd, setup_context=_save_for_backward)

DELTA_RULE = torch.ops.torchtitan_cp.gated_delta_rule.default
