"""Output layer and cross-entropy together, a chunk of the sequence at a time: full logits never exist."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_cp.attention.autograd import Context
from torchtitan_cp.attention.compiling import compile_whole
from torchtitan_cp.config.labels import IGNORED

# The weighted sum of losses, the loss of each token, and without `gradients` None for those of rows and output matrix.
Losses = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the output matrix this rank holds.

    Attributes:
        group: the ranks that together hold every row once.
        first: vocabulary index of the first row held here.
    """

    group: dist.ProcessGroup
    first: int

    def gather(self, values: Tensor) -> Tensor:
        """`[...]` of this rank -> `[ranks, ...]` of all ranks of the group."""
        gathered = values.new_empty(dist.get_world_size(self.group), *values.shape)
        dist.all_gather(list(gathered), values, group=self.group)
        return gathered


class ChunkedCrossEntropy(nn.Module):
    """Output layer and cross-entropy of the tokens of a rank, as a module so that hooks see it.

    The gradient of a chunk's logits is computed beside its losses, so that logits are computed once: memory is
    chunk_tokens x V and one V x E gradient in fp32, whatever the length. Products are in the dtype of `hidden`, what
    lies between them in fp32. Source: the fused linear cross-entropy of Liger Kernel (Hsu et al., 2024).

    Args:
        chunk_tokens: tokens whose logits exist at one time.
        z_loss: adds z_loss * logsumexp(logits)^2 of each counted token to the sum, and so to the gradient, which
            keeps logits from drifting. The losses of the tokens stay pure cross-entropy. Source: PaLM
            (Chowdhery et al., 2022).
        scale, softcap: of the logits: they become softcap tanh(scale logit / softcap), or scale logit without a
            softcap (0). Source: Granite, Cohere; Gemma 2.
        compiled: fuse what lies between the products, where this rank holds all rows of the output matrix.

    Attributes:
        compiled_losses: the compiled `_chunk_losses`, or None.
        largest_logit: fp32 scalar that forwards with gradients raise in place to the largest logit of this rank's
            rows; None: not measured. It is free: the log-sum-exp needs each token's largest logit.
    """

    def __init__(
        self, chunk_tokens: int, z_loss: float = 0.0, scale: float = 1.0, softcap: float = 0.0, compiled: bool = False
    ) -> None:
        super().__init__()
        self.chunk_tokens, self.z_loss, self.scale, self.softcap = chunk_tokens, z_loss, scale, softcap
        self.largest_logit: Tensor | None = None
        self.compiled_losses = compile_whole(ChunkedCrossEntropy._chunk_losses) if compiled else None

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary: VocabularyShard | None = None,
        token_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weighted sum of the losses, and the loss of each token.

        With a `vocabulary` shard, `hidden` and `labels` are the same on all ranks of its group, and so are both
        results. Each chunk costs one all-gather of two numbers a token. The gradient of `hidden` is then PARTIAL,
        from this rank's rows alone: the caller that gathered `hidden` sums it over the group.

        Args:
            hidden: `[B, S/cp, E]`.
            weight: output matrix `[V, E]`; with `vocabulary`, this rank's rows `[V_local, E]`, possibly none.
            labels: `[B, S/cp]` int64; IGNORED tokens do not count, and a label outside the vocabulary makes the loss
                infinite.
            vocabulary: None if this rank holds all rows.
            token_weights: `[B, S/cp]` fp32, finite, of each token in the sum; None: 1.

        Returns:
            (sum over tokens, fp32 scalar; loss of each token `[B, S/cp]` fp32 without its weight, not differentiable,
            0 where ignored).
        """
        weights = (labels != IGNORED).float()
        if token_weights is not None:
            weights *= token_weights
        compute = partial(self._losses, labels.flatten(), weights.flatten(), vocabulary)
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            total, losses = _LinearCrossEntropy.apply(hidden, weight, compute)
        else:
            total, losses, *_ = compute(hidden, weight, gradients=False)
        return total, losses.view(labels.shape)

    def _losses(
        self,
        labels: Tensor,
        weights: Tensor,
        vocabulary: VocabularyShard | None,
        hidden: Tensor,
        weight: Tensor,
        gradients: bool = True,
    ) -> Losses:
        """As forward, with labels and weights `[B S/cp]`; also gradients of hidden states and of a trained matrix."""
        rows = hidden.flatten(0, 1)
        losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        z_sum = losses.new_zeros(())
        d_rows = torch.empty_like(rows) if gradients else None
        trains_weight = gradients and weight.requires_grad
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if trains_weight else None
        chunk_losses = (None if vocabulary else self.compiled_losses) or ChunkedCrossEntropy._chunk_losses
        for start in range(0, len(labels), self.chunk_tokens):
            chunk = slice(start, start + self.chunk_tokens)
            arguments = labels[chunk], weights[chunk], vocabulary, gradients
            losses[chunk], squares, largest, d_products = chunk_losses(self, rows[chunk] @ weight.t(), *arguments)
            z_sum += (squares * weights[chunk]).sum()
            if d_rows is None or d_products is None:  # without gradients
                continue
            if self.largest_logit is not None:
                self.largest_logit.copy_(torch.maximum(self.largest_logit, largest))
            d_rows[chunk] = d_products @ weight
            if d_weight is not None:
                _add_product(d_weight, d_products.t(), rows[chunk])
            del d_products  # frees it before the next chunk's is made
        return (losses * weights).sum() + self.z_loss * z_sum, losses, d_rows, d_weight

    def _chunk_losses(
        self, products: Tensor, labels: Tensor, weights: Tensor, vocabulary: VocabularyShard | None, gradients: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Losses of a chunk from its products with the output matrix, `[tokens, V_local]`.

        Returns:
            each token's loss and its squared logsumexp (0 where ignored); the largest logit of this rank's rows; the
            gradient of the products, in their dtype (None without `gradients`).
        """
        logits = self.to_logits(products.float()) if self.softcap or self.scale != 1 else products
        row = labels - (vocabulary.first if vocabulary else 0)
        is_here = (row >= 0) & (row < logits.shape[-1])
        row = (row * is_here).unsqueeze(-1)
        probabilities, local_log_sums, largest = _softmax(logits)
        log_sums, targets = local_log_sums, torch.full_like(local_log_sums, -torch.inf)
        if logits.shape[-1]:
            targets = targets.where(~is_here, logits.gather(-1, row).squeeze(-1).float())
        if vocabulary:
            by_rank = vocabulary.gather(torch.stack([log_sums, targets]))
            log_sums, targets = by_rank[:, 0].logsumexp(0), by_rank[:, 1].amax(0)
        kept = labels != IGNORED
        losses, squares = (x.where(kept, 0.0) for x in (log_sums - targets, log_sums.square()))
        if not gradients:
            return losses, squares, largest, None
        slope = (1 + 2 * self.z_loss * log_sums) * weights
        d_logits = probabilities.mul_((slope * (local_log_sums - log_sums).exp()).unsqueeze(-1))
        d_logits = _subtract_at(d_logits, row, (is_here * weights).unsqueeze(-1))
        return losses, squares, largest, self.to_logits_backward(d_logits, logits).to(products.dtype)

    def to_logits(self, products: Tensor) -> Tensor:
        """Logits from the products of hidden states and output matrix, scaled and capped."""
        logits = products * self.scale if self.scale != 1 else products
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def to_logits_backward(self, d_logits: Tensor, logits: Tensor) -> Tensor:
        """Gradient of the products, written over the gradient of the logits."""
        slope = self.scale * (1 - (logits / self.softcap).square()) if self.softcap else self.scale
        return d_logits.mul_(slope) if self.softcap or self.scale != 1 else d_logits


@torch.no_grad()
def wrong_answers(hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: VocabularyShard | None = None) -> Tensor:
    """How many labels of each sequence are not the likeliest token, given all true tokens before it.

    Computes full logits of all labelled tokens at once, so use it for few labels.

    Args:
        hidden: `[B, S/cp, E]`; labels: `[B, S/cp]`, IGNORED where none is asked for.
        weight: the output layer's, `[V/tp, E]`; vocabulary: which rows of it these are, with tensor parallelism.

    Returns:
        `[B]` int64, for this rank's tokens.
    """
    rows, columns = (labels != IGNORED).nonzero(as_tuple=True)
    logits = hidden[rows, columns] @ weight.t()
    best = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=hidden.device)
    token = torch.zeros_like(best)
    if logits.shape[-1]:
        best, token = (x.double() for x in logits.max(-1))
    if vocabulary:
        best, token = vocabulary.gather(torch.stack([best, token + vocabulary.first])).unbind(1)
        token = token.gather(0, best.argmax(0, keepdim=True)).squeeze(0)
    wrong = token != labels[rows, columns]
    return labels.new_zeros(len(labels)).index_add_(0, rows, wrong.long())


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax `[tokens, V_local]` and logsumexp `[tokens]` in fp32 of logits of any dtype, and the largest logit."""
    probabilities = logits.softmax(-1, dtype=torch.float32)
    if not logits.shape[-1]:
        nothing = probabilities.new_full((len(logits),), -torch.inf)
        return probabilities, nothing, nothing.amax()
    largest, token = logits.max(-1, keepdim=True)
    # The likeliest token has at least 1 / V, so its logarithm is exact to rounding.
    log_sums = largest.float() - probabilities.gather(-1, token).log()
    return probabilities, log_sums.squeeze(-1), largest.amax()


def _subtract_at(d_logits: Tensor, row: Tensor, values: Tensor) -> Tensor:
    """Subtract `values` at each token's `row`, both `[tokens, 1]`; in place unless compiled."""
    if torch.compiler.is_compiling():  # fuses with the kernel before it
        is_row = torch.arange(d_logits.shape[-1], device=row.device) == row
        return torch.where(is_row, d_logits - values, d_logits)
    # Each token has one label, so scatter_ is enough; it is deterministic on CUDA, unlike scatter_add_.
    return d_logits.scatter_(-1, row, d_logits.gather(-1, row) - values) if d_logits.shape[-1] else d_logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to an fp32 `total` in place. On CUDA the product is not rounded to bf16 first."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and left.dtype.itemsize == 2:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


class _Context(Context, Protocol):
    weight_dtype: torch.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps the gradients that the forward pass has computed."""

    @staticmethod
    def forward(
        ctx: _Context, hidden: Tensor, weight: Tensor, losses: Callable[[Tensor, Tensor], Losses]
    ) -> tuple[Tensor, Tensor]:
        total, per_token, d_rows, d_weight = losses(hidden, weight)
        assert d_rows is not None
        ctx.save_for_backward(d_rows.view(hidden.shape), d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(per_token)
        return total, per_token

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        scale = gradients[0]
        # The hidden gradient is scaled in fp32: 1/tokens in bf16 would round each value twice.
        scaled = (d_hidden.float() * scale).to(d_hidden.dtype) if d_hidden.dtype != scale.dtype else d_hidden * scale
        if d_weight is None:  # the output layer is frozen
            return scaled, None, None
        # Cast in the product's kernel: a second fp32 matrix would set the step's peak memory.
        return scaled, torch.mul(d_weight, scale, out=torch.empty_like(d_weight, dtype=ctx.weight_dtype)), None
