"""Attention over the whole sequence in one process and fp64, by torch's own maths: what all is compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_cp.attention import AttentionMask


def allowed(mask: AttentionMask, sequence_length: int) -> Tensor:
    """`[rows, S, S]` bool, straight from the definition: true where a query may see a key."""
    position = torch.arange(sequence_length)
    rows = []
    for lengths in mask.document_lengths or ((sequence_length,),):
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        row = document[:, None] == document[None, :]
        rows.append(row & (position[:, None] >= position[None, :]) if mask.causal else row)
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
