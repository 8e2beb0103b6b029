"""The gated delta rule of one rank, 64 tokens at a time, in torch; or by flash-linear-attention where possible.

With a state S `[K, V]`, a log gate g and a step size beta, a token does

    S <- Diag(e^g) S;  v' = beta (v - k^T S);  S <- S + k v'^T;  out = scale q^T S

where g is one number (gated delta net, GDN) or one for each of the K rows (Kimi delta attention, KDA). Within a chunk
the values v' solve one triangular system, so a chunk is an affine map of the state S that enters it:

    v' = u - w S;  out = q_in S + attn v';  S <- gamma S + k_out^T v'

The only exponents are sums of log gates over the tokens between two others, so none is above 0: a quotient of
cumulative decays would overflow, and a difference of cumulative sums would lose digits. A document's first token has a
log gate of -inf, which is all that keeps documents apart.

Sources: Yang et al., Gated Delta Networks, 2024; Kimi Linear, 2025; the WY form of Bischof and Van Loan, 1987.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.caching import to_device
from torchtitan_cp.attention.compiling import with_autograd
from torchtitan_cp.attention.linear import flash_linear
from torchtitan_cp.attention.linear.states import INDEX_CACHE, DocumentSegment, Inputs, document_offsets
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.plan import Plan

CHUNK = 64  # tokens; a power of two
PART = 2**25  # values, [tokens, heads, V], that a kernel works on at a time; its working memory is about 20 times that
GROUPED_FROM = 256  # from this many chunks on, a scan on a GPU goes in groups; fewer take as long one after the other
NORM_EPSILON = 1e-6  # of the L2 norm of queries and keys, as in the published models


class Factors(NamedTuple):
    """What each of N chunks does to a state, `[N, B, Hk, R, ..]`: R value heads per key head, C tokens per chunk.

    Attributes:
        u: `[.., C, V]`; w, q_in, k_out: `[.., C, K]`; attn: `[.., C, C]`, as above.
        gamma: `[.., 1, 1]`, or `[.., K, 1]` for KDA.
    """

    u: Tensor
    w: Tensor
    attn: Tensor
    q_in: Tensor
    k_out: Tensor
    gamma: Tensor


def _make_chunk_rows(plan: Plan, like: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """Assign a rank's rows to slots of chunks. Each run begins a chunk, and may leave the end of its last one empty.

    Returns:
        (`[N * C]` the local row in each slot, 0 in an empty one; `[1 or B, N * C]` bool, whether a slot has a token;
        `[S/P]` the slot of each local row; the first chunk of each run; the last chunk of each run).
    """
    runs = plan.layout.runs(plan.mask, plan.sequence_length)[plan.rank]
    lengths = [stop - start for start, stop in pairwise([*runs, plan.local_tokens])]
    firsts = [*accumulate((-(-length // CHUNK) for length in lengths), initial=0)]
    slots = torch.cat([torch.arange(length) + first * CHUNK for length, first in zip(lengths, firsts, strict=False)])
    rows = torch.zeros(firsts[-1] * CHUNK, dtype=torch.int64)
    rows[slots] = torch.arange(len(slots))
    rows, slots, offsets = to_device(rows, like), to_device(slots, like), document_offsets(plan, like)
    has_token = offsets.new_zeros((len(offsets), len(rows)), dtype=torch.bool).index_copy(1, slots, offsets >= 0)
    return rows, has_token, slots, firsts[:-1], [first - 1 for first in firsts[1:]]


class TorchKernel:
    """Computes chunks in torch.

    Args:
        inputs: rows `[B, S/P, H, ..]`.
        rule: "delta", "normalized_delta" or "scan", which decides how a chunk's factors are made.
        dout: `[B, S/P, Hv, V]`, for a backward.
    """

    def __init__(self, inputs: Inputs, plan: Plan, scale: float, rule: str, dout: Tensor | None) -> None:
        self.rule, self.key_heads = rule, inputs.q.shape[2]
        self.scan = partial(scan, in_groups=inputs.q.is_cuda and rule != "scan")
        self.dtype = accumulation_dtype(inputs.q.dtype)
        self.rows, self.has_token, self.slots, self.firsts, self.lasts = INDEX_CACHE.get(
            ("chunks", plan), inputs.q, lambda: _make_chunk_rows(plan, inputs.q)
        )
        begins = document_offsets(plan, inputs.q)[:, :, None, None] == 0  # these tokens forget the state before them
        leaves = [self._split(x) for x in inputs._replace(g=inputs.g.masked_fill(begins, float("-inf")))]
        if dout is not None:
            self.dout = self._split(dout)
        with with_autograd(), torch.set_grad_enabled(dout is not None):
            self.leaves = Inputs(*(x.requires_grad_(dout is not None) for x in leaves))
            self.factors_with_graph = make_factors(self.leaves, scale, rule)
        self.factors = Factors(*(x.detach() for x in self.factors_with_graph))

    @cached_property
    def added(self) -> Tensor:
        """What each chunk's own tokens add to the state, `[N, B, Hk, R, K, V]`."""
        return self.factors.k_out.mT @ self.factors.u

    @cached_property
    def dstates_inside(self) -> Tensor:
        """The gradient of the state that enters each chunk, from the chunk's outputs, `[N, B, Hk, R, K, V]`."""
        return self.factors.q_in.mT @ self.dout - self.factors.w.mT @ (self.factors.attn.mT @ self.dout)

    def summarize(self, segment: DocumentSegment) -> Tensor:
        """A and B of a segment, which maps the state S that enters it to A S + B.

        Returns:
            A and B side by side, `[b, H, K, K + V]`; only B, `[b, H, K, V]`, if the segment begins its document. A
            scan's A is diagonal, and so one column.
        """
        factors, added = self._factors_of(segment), self.added[self._chunks(segment)]
        key_dim, value_dim = added.shape[-2:]
        starts = {}
        if segment.offset and self.rule != "scan":
            identity = torch.eye(key_dim, key_dim + value_dim, dtype=added.dtype, device=added.device)
            starts, added = {0: identity.expand(*added.shape[1:-1], -1)}, F.pad(added, (key_dim, 0))
        last = self.scan(factors, added, starts)[1]
        if segment.offset and self.rule == "scan":
            last = torch.cat([factors.gamma.prod(0).expand_as(last[..., :1]), last], -1)
        return last.flatten(1, 2)

    def outputs(self, entering: Tensor) -> Tensor:
        """Outputs `[B, S/P, Hv, V]`, from the states that enter the runs, `[runs, B, H, K, V]`."""
        factors, states = self.factors, self._chunk_states(entering)
        return self._join(factors.q_in @ states + factors.attn @ (factors.u - factors.w @ states))

    def gradient_inside(self, segment: DocumentSegment) -> Tensor:
        """G, the gradient of the state that enters a segment from the segment's own outputs, `[b, H, K, V]`."""
        dstates = self.dstates_inside[self._chunks(segment)]
        return self.scan(self._factors_of(segment), dstates, {}, back=True)[1].flatten(1, 2)

    def gradients(self, entering: Tensor, leaving: Tensor) -> list[Tensor]:
        """The gradients of the inputs.

        Args:
            entering: states that enter the runs; leaving: gradients of those that leave them, `[runs, B, H, K, V]`.
        """
        states = self._chunk_states(entering)
        starts = dict(zip(self.lasts, leaving, strict=False))
        dstates, _ = self.scan(self.factors, self.dstates_inside, starts, back=True)
        dfactors = factor_gradients(self.factors, states, self.dout, dstates)
        with with_autograd():
            return [self._join(x) for x in torch.autograd.grad(self.factors_with_graph, self.leaves, dfactors)]

    def _chunk_states(self, entering: Tensor) -> Tensor:
        """The states that enter the chunks, `[N, B, Hk, R, K, V]`."""
        starts = dict(zip(self.firsts, entering, strict=False))
        return self.scan(self.factors, self.added, starts)[0]

    def _split(self, x: Tensor) -> Tensor:
        """`[B, S/P, H, D] -> [N, B, Hk, H/Hk, C, D]`, zeros where there is no token."""
        rows = x.to(self.dtype).index_select(1, self.rows)
        chunks = torch.where(self.has_token[:, :, None, None], rows, 0.0)
        split = chunks.unflatten(2, (self.key_heads, -1)).unflatten(1, (-1, CHUNK))
        return split.permute(1, 0, 3, 4, 2, 5).contiguous()

    def _join(self, chunks: Tensor) -> Tensor:
        """The inverse of `_split`."""
        return chunks.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2).index_select(1, self.slots)

    def _chunks(self, segment: DocumentSegment) -> tuple[slice, slice]:
        """The chunks and batch rows of a segment."""
        first, end = self.firsts[segment.run], segment.begin + segment.tokens
        return slice(first + segment.begin // CHUNK, first - (-end // CHUNK)), segment.rows

    def _factors_of(self, segment: DocumentSegment) -> Factors:
        return Factors(*(x[self._chunks(segment)] for x in self.factors))


def in_parts(
    inputs: Inputs, plan: Plan, scale: float, rule: str, dout: Tensor | None = None
) -> Callable[..., list[Tensor]]:
    """Cut the heads into parts that fit the working memory.

    Returns:
        a function (dim, call, *states `[.., .., H, K, V]`), which calls `call` with each part's kernel and states, and
        joins the tensors that it returns along a dim.
    """
    key_heads, copies = inputs.q.shape[2], inputs.v.shape[2] // inputs.q.shape[2]
    fused = rule != "scan" and flash_linear.is_available(inputs, plan)
    kernel_class: type[flash_linear.FlashKernel | TorchKernel] = flash_linear.FlashKernel if fused else TorchKernel
    keys = key_heads if fused else max(1, PART * key_heads // max(1, inputs.v.numel()))
    values = keys * copies
    split = [x.split(keys if n < 2 else values, 2) for n, x in enumerate(inputs)]
    douts = [None] * len(split[0]) if dout is None else dout.split(values, 2)
    parts = zip(*split, douts, strict=True)
    make_kernels = [partial(kernel_class, Inputs(*part), plan, scale, rule, part_dout) for *part, part_dout in parts]
    if len(make_kernels) == 1:
        make_kernels = [cache(make_kernels[0])]  # type: ignore[list-item]

    def run_parts(dim: int, call: Callable[..., list[Tensor]], *states: Tensor) -> list[Tensor]:
        parts = zip(make_kernels, *(x.split(values, 2) for x in states), strict=True)
        results = [call(make_kernel(), *part_states) for make_kernel, *part_states in parts]
        return [torch.cat(x, dim) for x in zip(*results, strict=True)]

    return run_parts


def make_factors(inputs: Inputs, scale: float, rule: str) -> Factors:
    """The factors of chunks; differentiable.

    Args:
        inputs: in chunks.
        rule: "delta"; "normalized_delta", with queries and keys divided by their norms first; "scan", with
            v' = beta v, as in Mamba-2.
    """
    q, k, v, g, beta = inputs
    if rule == "normalized_delta":
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON) for x in (q, k))
    q = q * scale
    decay_in, decay_out = g.cumsum(-2).exp(), _sum_after(g).exp()
    scores, overlaps = _decayed_products(q, k, g) if g.shape[-1] > 1 else _products(q, k, g)
    q_in, k_out, gamma = decay_in * q, decay_out * k, decay_in[..., -1, :].unsqueeze(-1)
    if rule == "scan":
        return Factors(beta * v, 0.0 * beta * k, scores, q_in, k_out, gamma)
    system = beta * overlaps + torch.eye(CHUNK, dtype=g.dtype, device=g.device)
    right = beta * torch.cat([v, decay_in * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    return Factors(u, w, scores, q_in, k_out, gamma)


def _sum_after(g: Tensor) -> Tensor:
    """The sum of the log gates of all later tokens of a chunk."""
    return F.pad(g, (0, 0, 0, 1))[..., 1:, :].flip(-2).cumsum(-2).flip(-2)


def _products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(q . k up to each token, k . k before each token), decayed by the gates of the tokens between, `[.., C, C]`."""
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril(-1)
    between = g.expand(*g.shape[:-1], CHUNK).where(later, 0.0).cumsum(-2)
    decay = between.exp().tril()
    return q @ k.mT * decay, (k @ k.mT * decay).tril(-1)


def _decayed_products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """`_products` for KDA, with a gate for each token and key dim.

    Between two halves of the tokens, the products are one matrix product: queries decay from the middle on, and keys up
    to it. Each half is split again.
    """
    if (tokens := g.shape[-2]) == 1:
        return (q * k).sum(-1, keepdim=True) * torch.ones_like(g[..., :1]), torch.zeros_like(g[..., :1])
    halves = [x.unflatten(-2, (2, tokens // 2)) for x in (q, k, g)]
    early, late = ([x.select(-3, half) for x in halves] for half in (0, 1))
    decay_late, keys = late[2].cumsum(-2).exp(), _sum_after(early[2]).exp() * early[1]
    joined = []
    for within_halves, x in zip(_decayed_products(*halves), late, strict=False):
        first, last = within_halves.unbind(-3)
        across = (decay_late * x) @ keys.mT
        joined.append(torch.cat([F.pad(first, (0, tokens // 2)), torch.cat([across, last], -1)], -2))
    return joined[0], joined[1]


def factor_gradients(factors: Factors, states: Tensor, dout: Tensor, dstates: Tensor) -> Factors:
    """The gradients of the factors.

    Args:
        states: the states that enter the chunks.
        dstates: gradients of the states that leave them.
    """
    values = factors.u - factors.w @ states
    dvalues = factors.attn.mT @ dout + factors.k_out @ dstates
    dgamma = (states * dstates).sum(-1, keepdim=True).sum_to_size(factors.gamma.shape)
    return Factors(dvalues, -dvalues @ states.mT, dout @ values.mT, dout @ states.mT, values @ dstates.mT, dgamma)


def scan(
    factors: Factors, added: Tensor, starts: Mapping[int, Tensor], back: bool = False, in_groups: bool = False
) -> tuple[Tensor, Tensor]:
    """S <- gamma S + added - k_out^T (w S), chunk by chunk.

    Args:
        added: `[N, B, Hk, R, K, ..]`.
        starts: by chunk, an S that replaces the previous chunk's result; for the first chunk, zeros by default.
        back: go from the last chunk to the first with the transposed map, so that S is a gradient.
        in_groups: take many chunks in groups; see `_carry_in_groups`.

    Returns:
        (S before each chunk, S after the last one); with `back`, the gradients of the states that leave the chunks, and
        of the state that enters the first.
    """
    shape, (left, right) = added.shape, (factors.w, factors.k_out) if back else (factors.k_out, factors.w)
    gamma, left, right, added = (x.flatten(1, 3) for x in (factors.gamma, left, right, added))
    carry = _carry_in_groups if in_groups and len(added) >= GROUPED_FROM else _carry
    starts = {chunk: start.reshape(added.shape[1:]) for chunk, start in starts.items()}
    before, last = carry(gamma, left, right, added, starts, back)
    return before.view(shape), last.view(shape[1:])


def _carry(
    gamma: Tensor, left: Tensor, right: Tensor, added: Tensor, starts: Mapping[int, Tensor], back: bool
) -> tuple[Tensor, Tensor]:
    """A scan of `[N, b, ..]`, one chunk after the other. It writes each S where it is kept, as copies cost launches."""
    states, limits = added.new_empty(len(added) + 1, *added.shape[1:]), torch.finfo(added.dtype)
    before, after = (states[1:], states[:-1]) if back else (states[:-1], states[1:])
    chunks = range(len(added))[:: -1 if back else 1]
    starts = {chunks[0]: added.new_zeros(()), **starts}
    for chunk in chunks:
        x, x_after = before[chunk], after[chunk]
        if chunk in starts:
            x.copy_(starts[chunk])
        elif not added.is_cuda:
            # Products of smaller numbers would be subnormal, for which many CPUs take a hundred times as long.
            x.copy_(F.hardshrink(x, limits.tiny / limits.eps))
        torch.addcmul(added[chunk], gamma[chunk], x, out=x_after)
        x_after.baddbmm_(left[chunk].mT, right[chunk] @ x, alpha=-1)
    return before, x_after.clone()  # a view would keep every state alive


def _carry_in_groups(
    gamma: Tensor, left: Tensor, right: Tensor, added: Tensor, starts: Mapping[int, Tensor], back: bool
) -> tuple[Tensor, Tensor]:
    """`_carry` in about 3 sqrt(N) steps, for a GPU, where a step of few heads costs hardly more than its launches.

    sqrt(N) groups of sqrt(N) chunks are computed side by side: first the map S -> A S + B of each group; then, from the
    states that enter the groups, the states inside them.
    """
    if back:
        gamma, left, right, added = (x.flip(0) for x in (gamma, left, right, added))
        starts = {len(added) - 1 - chunk: start for chunk, start in starts.items()}
    key_dim, value_dim = added.shape[-2:]
    identity = torch.eye(key_dim, key_dim + value_dim, dtype=added.dtype, device=added.device)
    before, x = [], torch.zeros_like(added[0])
    for first, stop in pairwise(sorted({0, *starts, len(added)})):
        x, length = starts.get(first, x), math.isqrt(stop - first)
        groups = -(-(stop - first) // length)

        def side_by_side(x: Tensor, fill: float = 0.0) -> Tensor:
            padded = F.pad(x[first:stop], (0, 0) * 3 + (0, groups * length - stop + first), value=fill)  # noqa: B023
            return padded.unflatten(0, (groups, length)).transpose(0, 1).flatten(1, 2)  # noqa: B023

        parts = (side_by_side(gamma, 1.0), side_by_side(left), side_by_side(right))
        part_added = side_by_side(added)
        starts_of_maps = {0: identity.expand(part_added.shape[1], -1, -1)}
        _, maps = _carry(*parts, F.pad(part_added, (key_dim, 0)), starts_of_maps, False)
        entering = []
        for group_map in maps.unflatten(0, (groups, -1)):
            entering.append(x)
            x = torch.baddbmm(group_map[..., key_dim:], group_map[..., :key_dim], x)
        states, _ = _carry(*parts, part_added, {0: torch.cat(entering)}, False)
        before.append(states.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)[: stop - first])
    whole = torch.cat(before)
    return (whole.flip(0) if back else whole), x
