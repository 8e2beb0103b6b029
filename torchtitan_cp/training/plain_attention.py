"""What mixes tokens, on whole sequences in one process and written plainly: what ranks are compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor


class PlainAttention:
    """In place of LayerAttention; instead of plans it is given the number of each token's document, `[B, S]`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor,
        window: int,
        sinks: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Scaled dot-product attention of whole sequences with an explicit mask."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        rows = torch.arange(q.shape[2], device=q.device)
        distance = rows.unsqueeze(1) - rows
        seen = (distance >= 0) & (distance < (window or len(rows)))
        mask = seen & (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)
        if softcap:
            scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (scale or q.shape[-1] ** -0.5)
            capped = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
            if sinks is not None:
                capped = torch.cat([capped, sinks.to(q.dtype)[:, None, None].expand(*capped.shape[:-1], 1)], -1)
            weights = capped.softmax(-1)[..., : k.shape[2]]
            return (weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).transpose(1, 2)
        if sinks is not None:
            # One more key and value of zeros, whose score is the sink.
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            scores = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf).expand(-1, len(sinks), -1, -1)
            column = sinks.to(q.dtype)[:, None, None].expand(len(mask), -1, len(rows), 1)
            mask = torch.cat([scores, column], -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, scale=scale).transpose(1, 2)

    def causal_conv(self, x: Tensor, weight: Tensor, documents: Tensor, activation: str = "") -> Tensor:
        """A depthwise convolution, a product for each distance; x `[B, S, C]`, weight `[C, W]`."""
        assert activation == "silu"
        total = x * weight[:, -1]
        for distance in range(1, weight.shape[1]):
            same = documents[:, distance:] == documents[:, :-distance]
            moved = x[:, :-distance] * same.unsqueeze(-1) * weight[:, -1 - distance]
            total = total + F.pad(moved, (0, 0, distance, 0))
        return F.silu(total)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor, qk_l2norm: bool = False
    ) -> Tensor:
        """The recurrence, token by token, in fp32 or wider; shapes as of `torchtitan_cp.attention.gated_delta_rule`."""
        dtype, repeats = torch.promote_types(torch.float32, v.dtype), v.shape[2] // q.shape[2]
        own = v.dtype
        q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
        if qk_l2norm:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(repeats, 2) for x in (q * q.shape[-1] ** -0.5, k))
        starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        decay = g.exp() * ~starts.unsqueeze(-1)
        state, out = v.new_zeros(*v[:, 0].shape[:2], k.shape[-1], v.shape[-1]), []
        for token in range(v.shape[1]):
            state = state * decay[:, token, :, None, None]
            held = torch.einsum("bhk,bhkv->bhv", k[:, token], state)
            change = (v[:, token] - held) * beta[:, token, :, None]
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, token], change)
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, token], state))
        return torch.stack(out, 1).to(own)
