"""Output layer and cross-entropy together, a stretch of the sequence at a time: full logits never exist."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Sum of the losses of a shard, and the loss of each token.

    Logits and their gradient are made chunk by chunk in fp32, both in the forward pass, so that they need
    not be made again: memory is chunk_tokens x V and one V x E gradient, whatever the length. Source: the
    fused linear cross-entropy of Liger Kernel (Hsu et al., 2024).

    Args:
        hidden: `[B, S/cp, E]`.
        weight: output matrix `[V, E]`.
        labels: `[B, S/cp]` int64; IGNORED tokens count nothing.
        chunk_tokens: tokens whose logits exist at one time.

    Returns:
        (sum over tokens, fp32 scalar; loss of each token `[B, S/cp]` fp32, not differentiable, 0 where ignored).
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens)
    rows = hidden.flatten(0, 1).split(chunk_tokens)
    chunks = zip(rows, labels.flatten().split(chunk_tokens), strict=True)
    losses = torch.cat([_losses(_logits(row, weight), label) for row, label in chunks])
    return losses.sum(), losses.view(labels.shape)


def _logits(rows: Tensor, weight: Tensor) -> Tensor:
    return (rows @ weight.t()).float()


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
        rows, targets = hidden.flatten(0, 1), labels.flatten()
        losses = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        d_rows = torch.empty_like(rows)
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(targets), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = _logits(rows[chunk], weight)
            log_sums = logits.logsumexp(-1, keepdim=True)
            kept = (targets[chunk] != IGNORED).unsqueeze(-1)
            target = targets[chunk].clamp_min(0).unsqueeze(-1)
            losses[chunk] = ((log_sums - logits.gather(-1, target)) * kept).squeeze(-1)
            d_logits = logits.sub_(log_sums).exp_().mul_(kept)
            d_logits.scatter_add_(-1, target, -kept.float())
            d_logits = d_logits.to(rows.dtype)
            d_rows[chunk] = d_logits @ weight
            d_weight += d_logits.t() @ rows[chunk]
        ctx.save_for_backward(d_rows.view(hidden.shape), d_weight)
        ctx.weight_dtype = weight.dtype
        per_token = losses.view(labels.shape)
        ctx.mark_non_differentiable(per_token)
        return losses.sum(), per_token

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        scale = gradients[0]
        # The hidden gradient is scaled in fp32: 1/tokens in bf16 would round each value twice.
        scaled = (d_hidden.float() * scale).to(d_hidden.dtype) if d_hidden.dtype != scale.dtype else d_hidden * scale
        return scaled, (d_weight * scale).to(ctx.weight_dtype), None, None
