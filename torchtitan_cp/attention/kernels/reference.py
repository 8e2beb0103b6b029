"""Attention as written in the paper, with every score in memory: for tests and odd shapes. fp64-capable."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from torchtitan_cp.attention.kernels.kernel import Alibi, Case, Kernel, any_band
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.tiles import Tile


def forward(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, softcap: float = 0.0, alibi: Alibi | None = None
) -> tuple[Tensor, Tensor]:
    scores = _hide(_biased(_scores(q, k, scale, softcap), alibi), band)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhgqk,bkhd->bqhgd", (scores - lse[..., None]).exp(), v.to(scores.dtype))
    return out.flatten(2, 3).to(q.dtype), lse.permute(0, 3, 1, 2).flatten(2, 3)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
    scale: float,
    softcap: float = 0.0,
    alibi: Alibi | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Source: the derivation in FlashAttention (Dao et al., 2022), appendix B."""
    capped = _scores(q, k, scale, softcap)
    scores = _hide(_biased(capped, alibi), band)
    q, k, v, dout, out = (x.to(scores.dtype) for x in (q, k, v, dout, out))
    grouped = lambda x: x.unflatten(2, (k.shape[2], -1))  # noqa: E731
    probabilities = (scores - grouped(lse).permute(0, 2, 3, 1)[..., None]).exp()
    dv = torch.einsum("bhgqk,bqhgd->bkhd", probabilities, grouped(dout))
    row_dots = grouped((dout * out).sum(-1)).permute(0, 2, 3, 1)[..., None]
    dscores = probabilities * (torch.einsum("bqhgd,bkhd->bhgqk", grouped(dout), v) - row_dots) * scale
    if softcap:
        dscores *= 1 - (capped / softcap).square()
    dq = torch.einsum("bhgqk,bkhd->bqhgd", dscores, k).flatten(2, 3)
    dk = torch.einsum("bhgqk,bqhgd->bkhd", dscores, grouped(q))
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """`[B, Hkv, Hq/Hkv, Sq, Sk]`, fp32 or fp64, of hidden pairs too."""
    dtype = accumulation_dtype(q.dtype)
    grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k.to(dtype)) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _biased(scores: Tensor, alibi: Alibi | None) -> Tensor:
    if alibi is None:
        return scores
    distances = (alibi.queries[:, None] - alibi.keys).abs()
    return scores - alibi.slopes.to(scores.dtype).view(*scores.shape[1:3], 1, 1) * distances


def _hide(scores: Tensor, band: Band) -> Tensor:
    hidden = hidden_pairs(scores.shape[-2], scores.shape[-1], band, scores.device)
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def hidden_pairs(queries: int, keys: int, band: Band, device: torch.device) -> Tensor | None:
    """`[Sq, Sk]` bool, true where a band forbids a pair; None if it forbids none."""
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    hidden = None if band.high is None else everything.triu(band.high + 1)
    if band.low is not None:
        below = everything.tril(band.low - 1)
        hidden = below if hidden is None else hidden | below
    return hidden


def refusal(case: Case) -> str | None:
    return None if case.dtype.is_floating_point else f"it does not take {case.dtype}"


def softcapped(cap: float) -> Kernel:
    return replace(KERNEL, forward=partial(forward, softcap=cap), backward=partial(backward, softcap=cap))


def biased(alibi: Alibi) -> Kernel:
    """Each tile gets the positions of its own rows."""

    def for_tile(tile: Tile) -> Kernel:
        queries, keys = alibi.queries[tile.q_start : tile.q_stop], alibi.keys[tile.k_start : tile.k_stop]
        own = Alibi(alibi.slopes, queries, keys)
        return replace(KERNEL, forward=partial(forward, alibi=own), backward=partial(backward, alibi=own))

    return replace(KERNEL, for_tile=for_tile)


KERNEL = Kernel(forward, backward, refusal, takes_band=any_band, softcapped=softcapped, biased=biased)
