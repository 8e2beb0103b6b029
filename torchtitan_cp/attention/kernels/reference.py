"""Attention as written in the paper, with every score in memory: for tests and odd shapes. fp64-capable."""

from functools import partial

import torch
from torch import Tensor

from torchtitan_cp.attention.kernels.kernel import Case, Kernel, any_band
from torchtitan_cp.attention.mask import Band


def forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    scores = _hide(_scores(q, k, scale, softcap), band)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Source: the derivation in FlashAttention (Dao et al., 2022), appendix B."""
    capped = _scores(q, k, scale, softcap)
    scores = _hide(capped, band)
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
    """`[B, Hkv, Hq/Hkv, Sq, Sk]`, fp32 or fp64, hidden pairs too."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(wide).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k.to(wide)) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


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
    return Kernel(partial(forward, softcap=cap), partial(backward, softcap=cap), refusal, takes_band=any_band)


KERNEL = Kernel(forward, backward, refusal, takes_band=any_band, softcapped=softcapped)
