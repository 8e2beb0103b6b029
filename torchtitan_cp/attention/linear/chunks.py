"""The gated delta rule of one rank, 64 tokens at a time, in torch.

With a state S `[K, V]`, a log gate g and a step size beta, a token does

    S <- Diag(e^g) S;  v' = beta (v - k^T S);  S <- S + k v'^T;  out = scale q^T S

where g is one number (gated delta net, GDN) or one for each of the K rows (Kimi delta attention, KDA). Within a chunk
the values v' are the solution of one triangular system, so that a chunk is an affine map of the state S that enters:

    v' = u - w S;  out = q_in S + attn v';  S <- gamma S + k_out^T v'

Only sums of log gates over the tokens between two others are exponentiated, so that no exponent is above 0: a quotient
of cumulative decays would overflow, and a difference of cumulative sums would lose its digits. A document's first
token has a log gate of -inf, which is all that keeps documents apart.

Sources: Yang et al., Gated Delta Networks, 2024; Kimi Linear, 2025; the WY form of Bischof and Van Loan, 1987.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens; a power of two
NORM_EPSILON = 1e-6  # of the L2 norm of queries and keys, as in the published models


class Factors(NamedTuple):
    """What each of N chunks does to a state, `[N, B, Hk, R, ..]`: R value heads to a key head, C tokens a chunk.

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


class Inputs(NamedTuple):
    """What the rule takes: rows, or these in chunks.

    Attributes:
        q, k: `[N, B, Hk, 1, C, K]`, or `[B, s, Hk, K]`.
        v: `[N, B, Hk, R, C, V]`, or `[B, s, Hv, V]`.
        g: `[N, B, Hk, R, C, 1]`, or `[.., C, K]` for KDA; `[B, s, Hv, 1 or K]`; at most 0.
        beta: `[N, B, Hk, R, C, 1]`, or `[B, s, Hv, 1]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


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
    """(q . k up to each token, k . k before each token), decayed by one gate a token in between, `[.., C, C]`."""
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril(-1)
    between = g.expand(*g.shape[:-1], CHUNK).where(later, 0.0).cumsum(-2)
    decay = between.exp().tril()
    return q @ k.mT * decay, (k @ k.mT * decay).tril(-1)


def _decayed_products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a gate a token and key dim.

    Of the tokens of two neighbouring halves, the later ones decay from the middle on and the earlier ones up to it: a
    matrix product. The halves themselves are halved.
    """
    if (tokens := g.shape[-2]) == 1:
        return (q * k).sum(-1, keepdim=True) * torch.ones_like(g[..., :1]), torch.zeros_like(g[..., :1])
    halves = [x.unflatten(-2, (2, tokens // 2)) for x in (q, k, g)]
    early, late = ([x.select(-3, half) for x in halves] for half in (0, 1))
    decay_late, keys = late[2].cumsum(-2).exp(), _sum_after(early[2]).exp() * early[1]
    joined = []
    for inside, x in zip(_decayed_products(*halves), late, strict=False):
        first, last = inside.unbind(-3)
        across = (decay_late * x) @ keys.mT
        joined.append(torch.cat([F.pad(first, (0, tokens // 2)), torch.cat([across, last], -1)], -2))
    return joined[0], joined[1]


def chunk_states(factors: Factors, entering: Mapping[int, Tensor]) -> Tensor:
    """The states that enter the chunks, `[N, B, Hk, R, K, V]`.

    Args:
        entering: by chunk, states `[B, Hk, R, K, V]` that do not come from the chunk before; chunk 0's, where it is not
            among them, is zeros.
    """
    added = factors.k_out.mT @ factors.u
    return _scan(factors.gamma, factors.k_out, factors.w, added, entering, range(len(added)))[0]


def chunk_outputs(factors: Factors, states: Tensor) -> Tensor:
    """`[N, B, Hk, R, C, V]`."""
    return factors.q_in @ states + factors.attn @ (factors.u - factors.w @ states)


def summarize(factors: Factors, transition: bool, rule: str) -> Tensor:
    """Of the map S -> A S + B over the chunks, A and B side by side `[B, Hk, R, K, K + V]`, or B alone.

    A scan's A is diagonal: a column, `[.., K, 1 + V]`.
    """
    added = factors.k_out.mT @ factors.u
    start = torch.zeros_like(added[0])
    key_dim = start.shape[-2]
    if transition and rule != "scan":
        identity = torch.eye(key_dim, dtype=added.dtype, device=added.device)
        start = torch.cat([identity.expand(*start.shape[:-1], key_dim), start], -1)
        added = F.pad(added, (key_dim, 0))
    last = _scan(factors.gamma, factors.k_out, factors.w, added, {0: start}, range(len(added)))[1]
    if transition and rule == "scan":
        last = torch.cat([factors.gamma.prod(0).expand_as(last[..., :1]), last], -1)
    return last


def chunk_gradients(factors: Factors, dout: Tensor, leaving: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
    """(gradients of the states that leave the chunks, that of the state that enters the first).

    Args:
        leaving: gradients that do not come from the chunk after; the last chunk's, where not among them, is zeros.
    """
    added = factors.q_in.mT @ dout - factors.w.mT @ (factors.attn.mT @ dout)
    return _scan(factors.gamma, factors.w, factors.k_out, added, leaving, range(len(added) - 1, -1, -1))


def factor_gradients(factors: Factors, states: Tensor, dout: Tensor, dstates: Tensor) -> Factors:
    """The gradients of the factors.

    Args:
        states: that enter the chunks.
        dstates: gradients of those that leave them.
    """
    values = factors.u - factors.w @ states
    dvalues = factors.attn.mT @ dout + factors.k_out @ dstates
    dgamma = (states * dstates).sum(-1, keepdim=True)
    if factors.gamma.shape[-2] == 1:
        dgamma = dgamma.sum(-2, keepdim=True)
    return Factors(dvalues, -dvalues @ states.mT, dout @ values.mT, dout @ states.mT, values @ dstates.mT, dgamma)


def _scan(
    gamma: Tensor, left: Tensor, right: Tensor, added: Tensor, starts: Mapping[int, Tensor], order: Iterable[int]
) -> tuple[Tensor, Tensor]:
    """X <- gamma X + added - left^T (right X), chunk by chunk: (every chunk's X before it, the last X)."""
    shape = added.shape
    gamma, left, right, added = (x.flatten(1, 3) for x in (gamma, left, right, added))
    before, x = torch.empty_like(added), torch.zeros_like(added[0])
    for chunk in order:
        before[chunk] = x = starts[chunk].reshape(x.shape) if chunk in starts else x
        x = torch.baddbmm(torch.addcmul(added[chunk], gamma[chunk], x), left[chunk].mT, right[chunk] @ x, alpha=-1)
    return before.view(shape), x.view(shape[1:])
