"""Attention as in the paper, with every score in memory: for tests, and for shapes no other kernel takes. fp64 too."""

import torch
from torch import Tensor

from torchtitan_cp.attention.kernels.kernel import Kernel, ScoreMod
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import accumulation_dtype


def forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scores: ScoreMod) -> tuple[Tensor, Tensor]:
    logits = mask_scores(_capped_logits(q, k, scores), band)
    lse = logits.logsumexp(-1)
    out = torch.einsum("bhgqk,bkhd->bqhgd", (logits - lse[..., None]).exp(), v.to(logits.dtype))
    return out.flatten(2, 3).to(q.dtype), lse.permute(0, 3, 1, 2).flatten(2, 3)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scores: ScoreMod
) -> tuple[Tensor, Tensor, Tensor]:
    """Source: the derivation in FlashAttention (Dao et al., 2022), appendix B."""
    capped = _capped_logits(q, k, scores)
    logits = mask_scores(capped, band)
    q, k, v, dout, out = (x.to(logits.dtype) for x in (q, k, v, dout, out))
    grouped = lambda x: x.unflatten(2, (k.shape[2], -1))  # noqa: E731
    probabilities = (logits - grouped(lse).permute(0, 2, 3, 1)[..., None]).exp()
    dv = torch.einsum("bhgqk,bqhgd->bkhd", probabilities, grouped(dout))
    row_dots = grouped((dout * out).sum(-1)).permute(0, 2, 3, 1)[..., None]
    dscores = probabilities * (torch.einsum("bqhgd,bkhd->bhgqk", grouped(dout), v) - row_dots) * scores.scale
    if scores.softcap:
        dscores *= 1 - (capped / scores.softcap).square()
    dq = torch.einsum("bhgqk,bkhd->bqhgd", dscores, k).flatten(2, 3)
    dk = torch.einsum("bhgqk,bqhgd->bkhd", dscores, grouped(q))
    return dq, dk, dv


def _capped_logits(q: Tensor, k: Tensor, scores: ScoreMod) -> Tensor:
    """`[B, Hkv, Hq/Hkv, Sq, Sk]` scores of all pairs, fp32 or fp64."""
    dtype = accumulation_dtype(q.dtype)
    grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))
    logits = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k.to(dtype)) * scores.scale
    return scores.softcap * torch.tanh(logits / scores.softcap) if scores.softcap else logits


def mask_scores(scores: Tensor, band: Band) -> Tensor:
    """`[.., Sq, Sk]` scores, -inf where a band forbids a pair."""
    everything = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if band.high is not None:
        scores = scores.masked_fill(everything.triu(band.high + 1), float("-inf"))
    if band.low is not None:
        scores = scores.masked_fill(everything.tril(band.low - 1), float("-inf"))
    return scores


KERNEL = Kernel(forward, backward, takes_band=lambda queries, keys, band: True, has_softcap=True)
