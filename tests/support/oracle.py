"""Attention over the whole sequence in one process and fp64, by torch's own maths: what all is compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_cp.attention import AttentionMask


def allowed(mask: AttentionMask, sequence_length: int) -> Tensor:
    """`[rows, S, S]` bool, straight from the definition: true where a query may see a key."""
    position = torch.arange(sequence_length)
    distance = position[None, :] - position[:, None]
    seen = torch.ones(sequence_length, sequence_length, dtype=torch.bool)
    if mask.causal:
        seen &= distance <= 0
    left, right = mask.window
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    rows = []
    stored = mask.document_lengths or ((sequence_length,),)
    for lengths, used in zip(stored, mask.used_lengths or stored, strict=True):
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        token = torch.cat([torch.arange(room) < tokens for room, tokens in zip(lengths, used, strict=True)])
        rows.append(seen & (document[:, None] == document[None, :]) & token[:, None] & token[None, :])
    return torch.stack(rows)


def attention_with_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: AttentionMask, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, dq, dk, dv) in fp64 of `[B, S, H, D]` inputs."""
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    seen = allowed(mask, q.shape[1])[:, None]
    with sdpa_kernel(SDPBackend.MATH):
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*rows, attn_mask=seen, scale=scale, enable_gqa=True).transpose(1, 2)
    out.backward(dout.double())
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


def attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, sinks: Tensor, mask: AttentionMask, scale: float
) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv, dsinks) in fp64: the softmax has one more column, whose value is zero."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v, sinks)]
    q, k, v, sinks = leaves
    copies = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(copies, 2)) * scale
    scores = scores.masked_fill(~allowed(mask, q.shape[1])[:, None], float("-inf"))
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(copies, 2))
    out.backward(dout.double())
    return out.detach(), *(leaf.grad for leaf in leaves)  # type: ignore[return-value]


def draw_inputs(seq_len: int, heads: tuple[int, int] = (8, 2)) -> list[Tensor]:
    """q, k, v, dout, `[1, S, H, 8]` in fp64."""
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(1, seq_len, count, 8, dtype=torch.float64) for count in counts]
