"""A plain implementation of everything that mixes tokens, on whole sequences in one process, to compare ranks with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.linear.kernel import NORM_EPSILON
from torchtitan_cp.training.step_loss import add_loss


class PlainAttention:
    """Replaces LayerAttention. In place of plans it is given the number of each token's document, `[B, S]`.

    Attributes:
        step_tokens: as of LayerAttention.
    """

    def __init__(self) -> None:
        self.step_tokens: Tensor | None = None

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
        rows = torch.arange(q.shape[2], device=q.device)
        distance = rows.unsqueeze(1) - rows
        in_window = (distance >= 0) & (distance < (window or len(rows)))
        mask = in_window & (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)
        if sinks is None and not softcap:
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            return out.transpose(1, 2)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))  # as torch's attention does
        scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:  # one more score for each head, which has no value
            scores = torch.cat([scores, sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        return (scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v).transpose(1, 2)

    def causal_conv(self, x: Tensor, weight: Tensor, documents: Tensor, activation: str = "") -> Tensor:
        """A causal depthwise convolution within documents; x `[B, S, C]`, weight `[C, W]`."""
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
        dtype, out_dtype = torch.promote_types(torch.float32, v.dtype), v.dtype
        q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
        if qk_l2norm:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON) for x in (q, k))
        starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        state = v.new_zeros(len(v), v.shape[2], k.shape[-1], v.shape[-1])
        return delta_steps(q, k, v, g.exp() * ~starts.unsqueeze(-1), beta, state)[0].to(out_dtype)

    def sum_ranks(self, x: Tensor, documents: Tensor) -> Tensor:
        """`x`: no ranks share the sequences."""
        return x

    def add_loss(self, hidden: Tensor, loss_sum: Tensor) -> Tensor:
        """As of LayerAttention."""
        return add_loss(hidden, loss_sum, self.step_tokens)


def delta_steps(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule, token by token.

    Args:
        q, k, v, beta: as for `torchtitan_cp.attention.gated_delta_rule`, in fp32 or wider.
        decay: `[B, S, Hv]`, the factor on the state before each token.
        state: `[B, Hv, K, V]`, before the first token.

    Returns:
        outputs `[B, S, Hv, V]`, and the state after the last token.
    """
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).unsqueeze(-1) for x in (q * q.shape[-1] ** -0.5, k))
    decay, beta = (x[..., None, None] for x in (decay, beta))
    out = []
    for token in range(v.shape[1]):
        state = decay[:, token] * state
        change = v[:, token] - (k[:, token] * state).sum(2)
        state = state + beta[:, token] * k[:, token] * change.unsqueeze(2)
        out.append((q[:, token] * state).sum(2))
    return torch.stack(out, 1), state
