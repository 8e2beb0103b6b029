"""Inputs of the gated delta rule and the short convolution on ranks, and their answers token by token in fp64."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.recurrence import convolution, delta_rule, documents_of
from torchtitan_cp.attention import (
    AttentionMask,
    ContextParallel,
    Plan,
    causal_conv,
    gated_delta_rule,
    make_plan,
    sum_ranks,
)
from torchtitan_cp.attention.collectives import Group

S, BATCH, KEY_DIM, VALUE_DIM, SCALE = 48, 2, 8, 6, 0.4

MASKS = {
    "one document": AttentionMask(),
    "packed": AttentionMask(document_lengths=((7, 1, 25, 15),)),
    "documents of length 1": AttentionMask(document_lengths=((1,) * 48,)),
    "a token at each end": AttentionMask(document_lengths=((1, 46, 1),)),
    "rows packed differently": AttentionMask(document_lengths=((48,), (1, 30, 3, 14))),
    "gaps": AttentionMask(document_lengths=((8, 20, 20),), used_lengths=((5, 20, 13),)),
    "gaps of two rows": AttentionMask(document_lengths=((24, 24), (40, 8)), used_lengths=((3, 24), (40, 0))),
}

HEADS = {"4 of 4": (4, 4), "8 of 2": (2, 8), "3 of 3": (3, 3), "6 of 3": (3, 6), "2 of 1": (1, 2)}  # Hv of Hk


class Case(NamedTuple):
    """What a rule is given; heads' gates differ."""

    mask: str
    heads: str
    rule: str
    gates: str
    beta: str
    l2norm: bool
    dtype: torch.dtype


def draw(
    generator: torch.Generator,
    heads: tuple[int, int],
    rule: str,
    gates: str,
    beta: str,
    length: int,
    batch: int = BATCH,
) -> list[Tensor]:
    """q, k, v, g, beta and dout in fp64; keys have norm 1."""
    key_heads, value_heads = heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, length, *shape, generator=generator, dtype=torch.float64)

    q, k = normal(key_heads, KEY_DIM), normal(key_heads, KEY_DIM)
    v, dout = normal(value_heads, VALUE_DIM), normal(value_heads, VALUE_DIM)
    shape = (value_heads, KEY_DIM) if rule == "KDA" else (value_heads,)
    # A head's gates are near a mean of its own, and slow: a state outlives a chunk.
    soft = -normal(*shape).abs() * torch.linspace(0.005, 0.1, value_heads).view(-1, *[1] * (len(shape) - 1))
    kinds = {"soft": soft, **{name: torch.full_like(soft, float(name)) for name in ("0", "-1e-9", "-800")}}
    chosen = torch.randint(4, soft.shape, generator=generator)
    kinds["mixed"] = torch.stack(list(kinds.values())).gather(0, chosen[None])[0]
    between = 2 * torch.rand(batch, length, value_heads, generator=generator, dtype=torch.float64)
    size = between if beta == "between" else torch.full_like(between, float(beta))
    return [q, k / k.norm(dim=-1, keepdim=True), v, kinds[gates], size, dout]


def inputs(case: Case) -> list[Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(sum(map(ord, "".join(case[:5]))))
    return [x.to(case.dtype) for x in draw(generator, HEADS[case.heads], case.rule, case.gates, case.beta, S)]


def tokens(mask: AttentionMask, length: int, batch: int) -> Tensor:
    """`[B, S]` bool: whether a position holds a token of a document."""
    held = torch.zeros(batch, length, dtype=torch.bool)
    for row in range(batch):
        for document in documents_of(mask, length, row):
            held[row, list(document)] = True
    return held


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@cache
def expected(case: Case) -> list[Tensor]:
    """The recurrence's answer in fp64 to inputs as the case's dtype holds them."""
    *tensors, dout = (x.double() for x in inputs(case))
    mask = MASKS[case.mask]
    return with_gradients(lambda *leaves: delta_rule(*leaves, mask, SCALE, case.l2norm), tensors, dout)


@cache
def make_cp(layout: str = "zigzag", strategy: str = "auto") -> ContextParallel:
    return ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), strategy, layout=layout)


def on_rank(plan: Plan, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """The rule on this rank's shard: the gathered out and gradients."""
    *local, dout = (plan.shard(x) for x in tensors)
    answers = with_gradients(lambda *leaves: gated_delta_rule(*leaves, plan, SCALE, **options), local, dout)
    assert all(x.dtype == y.dtype for x, y in zip(answers[1:], tensors, strict=False))
    return [plan.unshard(x) for x in answers]


def check(answers: list[Tensor], want: list[Tensor], tolerance: float, told: Any) -> None:
    """Relative L2 of each tensor; where the true value is next to nothing, of what it is a sum of."""
    for number, (got, reference) in enumerate(zip(answers, want, strict=True)):
        assert got.isfinite().all(), (told, number)
        error = ((got - reference).norm() / max(reference.norm(), 0.01 * reference.numel() ** 0.5)).item()
        assert error < tolerance, (told, number, error)


def convolution_inputs(width: int, dtype: torch.dtype, length: int = S) -> list[Tensor]:
    """x, weight, bias and dout, the same on every rank."""
    generator = torch.Generator().manual_seed(width)
    shapes = (BATCH, length, 5), (5, width), (5,), (BATCH, length, 5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def convolve_on_rank(plan: Plan, tensors: list[Tensor], biased: bool, activation: str | None) -> list[Tensor]:
    """The gathered out and dx, and dweight and dbias summed over the ranks."""
    x, weight, bias, dout = tensors
    leaves = [plan.shard(x), weight, *([bias] if biased else [])]

    def convolve(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return causal_conv(x, weight, plan, *bias, activation=activation)

    out, dx, *rest = with_gradients(convolve, leaves, plan.shard(dout))
    return [plan.unshard(out), plan.unshard(dx), *(sum_ranks(parameter, plan) for parameter in rest)]


def expected_convolution(
    mask: AttentionMask, tensors: list[Tensor], biased: bool, activation: str | None
) -> list[Tensor]:
    x, weight, bias, dout = (y.double() for y in tensors)
    leaves = [x, weight, *([bias] if biased else [])]

    def convolve(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return convolution(x, weight, mask, *bias, activation=activation)

    return with_gradients(convolve, leaves, dout)


def count_bytes(run: Callable[[], Any]) -> int:
    """What this rank sends to others during a run."""
    sent, post = [], Group._post

    def counting(self: Group, sends: list[tuple[int, Tensor]], *rest: Any) -> Any:
        sent.extend(x.nbytes for _, x in sends)
        return post(self, sends, *rest)

    Group._post = counting  # type: ignore[method-assign]
    try:
        run()
    finally:
        Group._post = post  # type: ignore[method-assign]
    return sum(sent)


def run_long(seed: int, dtype: torch.dtype, rule: str, strategy: str, layout: str) -> list[Tensor]:
    tensors = long_inputs(seed, dtype, rule)
    return on_rank(make_cp(layout).plan(LONG, LONG_MASK), tensors, strategy=strategy)


LONG, LONG_MASK = 576, AttentionMask(document_lengths=((150, 426),))


def long_inputs(seed: int, dtype: torch.dtype, rule: str) -> list[Tensor]:
    """Several chunks a run."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, g, beta, dout = draw(generator, (2, 4), rule, "soft", "between", LONG, 1)
    return [x.to(dtype) for x in (q, k, v, g, beta, dout)]


@cache
def long_answers(dtype: torch.dtype, rule: str, exact: bool) -> list[Tensor]:
    """Of the recurrence in fp64, or of one process in the inputs' dtype."""
    *tensors, dout = long_inputs(1, dtype, rule)
    if exact:
        leaves = [x.double() for x in tensors]
        return with_gradients(lambda *x: delta_rule(*x, LONG_MASK, SCALE), leaves, dout.double())
    plan = make_plan(LONG, mask=LONG_MASK)
    return with_gradients(lambda *x: gated_delta_rule(*x, plan, SCALE), tensors, dout)


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What the docstrings of `chunk_gated_delta_rule` and `chunk_kda` say, for packed sequences, token by token."""
    (batch, tokens, heads, key_dim), (value_heads, value_dim) = q.shape, v.shape[2:]
    assert cu_seqlens is not None
    assert initial_state is not None
    assert scale is not None
    assert output_final_state
    assert batch == 1
    assert k.shape == q.shape
    assert value_heads % heads == 0
    assert key_dim <= 256
    assert g.shape in ((1, tokens, value_heads), (1, tokens, value_heads, key_dim))
    assert beta.shape == v.shape[:3]
    assert initial_state.shape == (len(cu_seqlens) - 1, value_heads, key_dim, value_dim)
    assert cu_seqlens.dtype == torch.int64
    assert cu_seqlens[0] == 0
    assert cu_seqlens[-1] == tokens
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x[0].repeat_interleave(value_heads // heads, 1) for x in (q, k))
    decay, outs, states = (g if g.ndim == 4 else g.unsqueeze(-1)).exp()[0], [], []
    for start, stop, state in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), initial_state, strict=True):
        assert start < stop
        for token in range(start, stop):
            state = decay[token].unsqueeze(-1) * state
            change = beta[0, token, :, None] * (v[0, token] - (k[token].unsqueeze(-1) * state).sum(1))
            state = state + k[token].unsqueeze(-1) * change.unsqueeze(1)
            outs.append(scale * (q[token].unsqueeze(-1) * state).sum(1))
        states.append(state)
    return torch.stack(outs).unsqueeze(0).to(v.dtype), torch.stack(states)


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()
