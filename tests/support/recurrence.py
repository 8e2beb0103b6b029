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


def first_and_used(mask: AttentionMask, batch: int, sequence_length: int) -> tuple[Tensor, Tensor]:
    """`[B, S]` bool each: the first token of a document, and any token of one."""
    first, used = (torch.zeros(batch, sequence_length, dtype=torch.bool) for _ in range(2))
    for row in range(batch):
        for document in filter(None, documents_of(mask, sequence_length, row)):
            first[row, document.start] = True
            used[row, document.start : document.stop] = True
    return first, used


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: AttentionMask, scale: float, l2norm: bool = False
) -> Tensor:
    """`[B, S, Hv, V]` of q, k `[B, S, Hk, K]`, v `[B, S, Hv, V]`, g `[B, S, Hv]` or `[.., K]`, beta `[B, S, Hv]`."""
    copies = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(copies, 2), k.repeat_interleave(copies, 2)
    if l2norm:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    decay = (g if g.ndim == 4 else g[..., None].expand_as(k)).exp()
    first, used = first_and_used(mask, *q.shape[:2])
    state, out = q.new_zeros(len(q), v.shape[2], k.shape[-1], v.shape[-1]), []
    for token in range(q.shape[1]):
        key, value = k[:, token], v[:, token]
        state = decay[:, token, :, :, None] * state.masked_fill(first[:, token, None, None, None], 0)
        error = value - torch.einsum("bhk,bhkv->bhv", key, state)
        state = state + beta[:, token, :, None, None] * key[..., None] * error[:, :, None]
        out.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, token], state))
    return torch.stack(out, 1).masked_fill(~used[..., None, None], 0)


def convolution(
    x: Tensor, weight: Tensor, mask: AttentionMask, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`[B, S, C]`: each document on its own, behind zeros."""
    channels, width = weight.shape
    rows = []
    for row in range(x.shape[0]):
        out = [x.new_zeros(channels)] * x.shape[1]
        for document in documents_of(mask, x.shape[1], row):
            if not document:
                continue
            part = F.pad(x[row, document.start : document.stop].T, (width - 1, 0))
            whole = (part.unfold(-1, width, 1) * weight[:, None]).sum(-1).T
            whole = whole if bias is None else whole + bias
            whole = whole if activation is None else whole * torch.sigmoid(whole)
            out[document.start : document.stop] = list(whole)
        rows.append(torch.stack(out))
    return torch.stack(rows)
