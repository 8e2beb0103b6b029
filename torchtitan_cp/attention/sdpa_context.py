"""Context parallelism for unmodified models: their scaled_dot_product_attention calls are intercepted."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from torchtitan_cp.attention.api import ContextParallel
from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.shard_checks import ShardChecks, counts_positions, never_called

# The last two serve calls without autograd, in inference mode.
DISPATCH_KEYS = ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA")


@contextmanager
def context_parallel(
    cp: ContextParallel,
    buffers: Sequence[Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: set[Tensor] | None = None,
    *,
    mask: AttentionMask | None = None,
    model: nn.Module | None = None,
) -> Iterator[Plan]:
    """Within the block, buffers hold this rank's shard and every SDPA call attends over the full sequence.

    Calls are intercepted wherever the model imported the function from. Run the backward inside the block
    too: a saved buffer is a shard only there, and a recomputation under activation checkpointing must be
    intercepted like its forward. Positions must come from a buffer, since a model that counts its own would
    count from 0 on every rank. Shift the labels of a next-token loss before they are sharded, since a shard's
    next token may be on another rank. Each rank has the loss of its own tokens: divide their sum by the token
    count of all ranks. For Hugging Face models that is `model(ids, attention_mask=torch.ones_like(ids),
    position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=count)`: given a mask of
    ones they leave the causal order to SDPA; without one they read a shard's positions as packed documents
    and build a mask of their own, which is refused here.

    Args:
        cp: how attention crosses the ranks.
        buffers: tensors of one length along their sequence dims, sharded in place and restored at the end.
        buffer_seq_dims: the sequence dim of each.
        no_restore_buffers: of these, the ones left as shards.
        mask: what may attend to what; default the causal order of each call, over one document.
        model: named in the error if it never calls SDPA.

    Yields:
        this rank's plan.

    Raises:
        PlanError: buffers that do not fit together; a call that a shard cannot honour (with an attn_mask, a
            dropout, another length, another causal order than `mask`'s, reentrant checkpointing); a module named
            as attention that makes no call, or has a window other than `mask`'s; a convolution or recurrence
            over the sequence; positions counted or labels shifted within the shard; or no call at all.
    """
    length = _common_length(buffers, buffer_seq_dims)
    asked = mask or AttentionMask()
    layout_plan = cp.plan(length, asked)
    other = cp.plan(length, replace(asked, causal=not asked.causal), like=layout_plan)
    plans = {asked.causal: layout_plan, other.mask.causal: other}
    counts = [counts_positions(buffer, dim) for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)]
    whole = [buffer.detach().view(buffer.shape) for buffer in buffers]
    try:
        with torch.no_grad():
            for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
                buffer.set_(layout_plan.shard(buffer, dim).contiguous())  # type: ignore[call-overload]
        calls = _Calls(cp, plans, mask)
        shards = list(zip(buffers, buffer_seq_dims, counts, strict=True))
        calls.checks = ShardChecks(layout_plan.local_tokens, length, shards, mask, lambda: calls.count)
        with _intercept(calls.attend), calls.checks.active():
            yield layout_plan
        if not calls.count:
            raise never_called(model)
    finally:
        with torch.no_grad():
            for buffer, full in zip(buffers, whole, strict=True):
                if not any(buffer is kept for kept in no_restore_buffers or ()):
                    buffer.set_(full)  # type: ignore[call-overload]


@contextmanager
def _intercept(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Every call of the operator behind scaled_dot_product_attention goes to `attend`, in every thread.

    The operator is replaced, not the Python function: modules hold the function under other names, and a
    recomputation runs in autograd's threads.
    """
    library = torch.library.Library("aten", "IMPL")
    for key in DISPATCH_KEYS:
        library.impl("scaled_dot_product_attention", attend, key)
    try:
        yield
    finally:
        library._destroy()


class _Calls:
    """Sends calls of scaled_dot_product_attention to the context-parallel attention, and counts them."""

    checks: ShardChecks

    def __init__(self, cp: ContextParallel, plans: dict[bool, Plan], mask: AttentionMask | None) -> None:
        self.cp, self.plans, self.mask, self.count = cp, plans, mask, 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The signature of torch.nn.functional.scaled_dot_product_attention, `[B, H, S/P, D]`."""
        refusal = self._refusal(query, key, value, attn_mask, dropout_p, is_causal)
        if not self.count:
            # At the first call all ranks raise if one refuses: the others would wait for its keys.
            refused = torch.tensor(float(refusal is not None), device=query.device)
            for group in self.plans[True].process_groups:
                refused = group.maximum(refused)
            if refused and not refusal:
                refusal = PlanError("another rank refused this call; its message says why")
        if refusal:
            raise refusal
        self.count += 1
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.cp.attention(q, k, v, self.plans[is_causal], scale=scale).transpose(1, 2)

    def _refusal(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
    ) -> PlanError | None:
        """Why a shard cannot honour a call, or None."""
        if counted := self.checks.counted_positions():
            return counted
        if attn_mask is not None:
            return PlanError(
                f"scaled_dot_product_attention was given a mask {tuple(attn_mask.shape)}, which covers one shard only",
                fix="describe it as context_parallel(..., mask=AttentionMask(...)) and let the model build none "
                "(Hugging Face models: pass attention_mask=torch.ones_like(input_ids))",
            )
        if dropout_p:
            return PlanError(f"attention dropout of {dropout_p} is not available", fix="set it to 0")
        if self.mask and self.mask.causal != is_causal:
            return PlanError(f"the call has is_causal = {is_causal} and the mask causal = {self.mask.causal}")
        local_tokens = self.plans[is_causal].local_tokens
        if query.ndim != 4 or {x.shape[-2] for x in (query, key, value)} != {local_tokens}:
            return PlanError(
                f"scaled_dot_product_attention was called with q {tuple(query.shape)}, k {tuple(key.shape)}, and a "
                f"shard has {local_tokens} tokens",
                fix="only self-attention over the sharded sequence, [B, H, S/P, D], can be intercepted",
            )
        if not torch.is_grad_enabled() and _in_reentrant_checkpoint():
            return PlanError(
                "reentrant activation checkpointing would recompute attention without context parallelism",
                fix="use torch.utils.checkpoint with use_reentrant=False",
            )
        return None


def _in_reentrant_checkpoint() -> bool:
    """Whether a caller is the forward of a reentrant checkpoint, whose backward may run after the block."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _common_length(buffers: Sequence[Tensor], dims: Sequence[int]) -> int:
    if not buffers or len(buffers) != len(dims):
        raise PlanError(
            f"context_parallel has {len(buffers)} buffers and {len(dims)} sequence dims",
            fix="give at least one buffer, and one dim for each",
        )
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        raise PlanError(f"the buffers have sequences of {sorted(lengths)} tokens", fix="give dims of one length")
    if any(buffer.requires_grad for buffer in buffers):
        raise PlanError("a buffer requires grad and cannot be sharded in place", fix="shard it with plan.shard")
    return lengths.pop()
