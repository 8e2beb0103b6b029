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

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        documents: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """A causal depthwise convolution within documents; x `[B, S, C]`, weight `[C, W]`, bias `[C]`."""
        assert activation in (None, "silu")
        total = x * weight[:, -1] + (0.0 if bias is None else bias)
        for distance in range(1, weight.shape[1]):
            same = documents[:, distance:] == documents[:, :-distance]
            moved = x[:, :-distance] * same.unsqueeze(-1) * weight[:, -1 - distance]
            total = total + F.pad(moved, (0, 0, distance, 0))
        return F.silu(total) if activation else total

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor, qk_l2norm: bool = False
    ) -> Tensor:
        """The recurrence, token by token, in fp32 or wider; shapes as of `torchtitan_cp.attention.gated_delta_rule`."""
        dtype, out_dtype = torch.promote_types(torch.float32, v.dtype), v.dtype
        q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
        if qk_l2norm:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON) for x in (q, k))
        decay = g.exp() * ~_starts(documents).view(*documents.shape, *(1,) * (g.ndim - 2))
        state = v.new_zeros(len(v), v.shape[2], k.shape[-1], v.shape[-1])
        return delta_steps(q, k, v, decay, beta, state)[0].to(out_dtype)

    def selective_scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, documents: Tensor) -> Tensor:
        """The scan, token by token, in fp32 or wider; shapes as of `torchtitan_cp.attention.selective_scan`."""
        dtype, out_dtype = torch.promote_types(torch.float32, x.dtype), x.dtype
        x, dt, A, B, C = (y.to(dtype) for y in (x, dt, A, B, C))
        decay = (dt * A).exp() * ~_starts(documents).unsqueeze(-1)
        state = x.new_zeros(len(x), x.shape[2], B.shape[-1], x.shape[-1])
        return scan_steps(x, dt, decay, B, C, state)[0].to(out_dtype)

    def sum_ranks(self, x: Tensor, documents: Tensor) -> Tensor:
        """`x`: no ranks share the sequences."""
        return x

    def add_loss(self, hidden: Tensor, loss_sum: Tensor) -> Tensor:
        """As of LayerAttention."""
        return add_loss(hidden, loss_sum, self.step_tokens)


def _starts(documents: Tensor) -> Tensor:
    """Whether each token is the first of its document, `[B, S]`."""
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))


def delta_steps(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule, token by token.

    Args:
        q, k, v, beta: as for `torchtitan_cp.attention.gated_delta_rule`, in fp32 or wider.
        decay: `[B, S, Hv]` or `[B, S, Hv, K]`, the factor on the state before each token.
        state: `[B, Hv, K, V]`, before the first token.

    Returns:
        outputs `[B, S, Hv, V]`, and the state after the last token.
    """
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).unsqueeze(-1) for x in (q * q.shape[-1] ** -0.5, k))
    decay, beta = (x.unsqueeze(-1) if x.ndim == 4 else x[..., None, None] for x in (decay, beta))
    out = []
    for token in range(v.shape[1]):
        state = decay[:, token] * state
        change = v[:, token] - (k[:, token] * state).sum(2)
        state = state + beta[:, token] * k[:, token] * change.unsqueeze(2)
        out.append((q[:, token] * state).sum(2))
    return torch.stack(out, 1), state


def scan_steps(x: Tensor, dt: Tensor, decay: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The scan of Mamba-2, token by token.

    Args:
        x, dt, B, C: as for `torchtitan_cp.attention.selective_scan`, in fp32 or wider.
        decay: `[B, S, H]`, the factor on the state before each token.
        state: `[B, H, N, D]`, before the first token.

    Returns:
        outputs `[B, S, H, D]`, and the state after the last token.
    """
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2).unsqueeze(-1) for y in (B, C))
    added, decay = (dt.unsqueeze(-1) * x).unsqueeze(3), decay[..., None, None]
    out = []
    for token in range(x.shape[1]):
        state = decay[:, token] * state + B[:, token] * added[:, token]
        out.append((C[:, token] * state).sum(2))
    return torch.stack(out, 1), state
