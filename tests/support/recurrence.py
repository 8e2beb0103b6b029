"""Linear attention token by token, in one process and the inputs' dtype: what all of it is compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention import AttentionMask


def documents_of(mask: AttentionMask, sequence_length: int, row: int) -> list[range]:
    """The positions of each document's tokens in a batch row, straight from the definition."""
    stored = mask.document_lengths or ((sequence_length,),)
    used = mask.used_lengths or stored
    number = row if len(stored) > 1 else 0
    documents, start = [], 0
    for room, tokens in zip(stored[number], used[number], strict=True):
        documents.append(range(start, start + tokens))
        start += room
    return documents


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: AttentionMask, scale: float, l2norm: bool = False
) -> Tensor:
    """`[B, S, Hv, V]` of q, k `[B, S, Hk, K]`, v `[B, S, Hv, V]`, g `[B, S, Hv]` or `[.., K]`, beta `[B, S, Hv]`."""
    copies = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(copies, 2), k.repeat_interleave(copies, 2)
    if l2norm:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    decay = (g if g.ndim == 4 else g[..., None].expand_as(k)).exp()
    rows = []
    for row in range(q.shape[0]):
        out = [torch.zeros_like(v[row, 0])] * q.shape[1]
        for document in documents_of(mask, q.shape[1], row):
            state = q.new_zeros(v.shape[2], k.shape[-1], v.shape[-1])
            for token in document:
                key, value = k[row, token], v[row, token]
                state = decay[row, token, :, :, None] * state
                error = value - torch.einsum("hk,hkv->hv", key, state)
                state = state + beta[row, token, :, None, None] * key[:, :, None] * error[:, None, :]
                out[token] = scale * torch.einsum("hk,hkv->hv", q[row, token], state)
        rows.append(torch.stack(out))
    return torch.stack(rows)


def convolution(
    x: Tensor, weight: Tensor, mask: AttentionMask, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`[B, S, C]`: torch's convolution of each document on its own."""
    channels, width = weight.shape
    rows = []
    for row in range(x.shape[0]):
        out = [x.new_zeros(channels)] * x.shape[1]
        for document in documents_of(mask, x.shape[1], row):
            if not document:
                continue
            part = F.pad(x[row, document.start : document.stop].T, (width - 1, 0))
            whole = F.conv1d(part[None], weight[:, None], bias, groups=channels)[0].T
            whole = whole if activation is None else whole * torch.sigmoid(whole)
            out[document.start : document.stop] = list(whole)
        rows.append(torch.stack(out))
    return torch.stack(rows)
