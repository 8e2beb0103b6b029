"""Context parallelism for models that know nothing of it: their scaled_dot_product_attention is caught."""

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
from torchtitan_cp.attention.shard_checks import SDPA_FIX, Guard, counts_positions


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

    Calls are caught wherever the model imported the function from. Run the backward inside the block too:
    a saved buffer is its shard only there, and a recomputation under activation checkpointing must be caught
    like its forward. Positions have to come from a buffer; a model that counts its own would count from 0
    on every rank. A next-token loss must shift its labels before they are sharded, since a shard's next
    token may lie on another rank; and each rank has the loss of its own tokens: divide their sum by the count
    of all ranks. For Hugging Face models that is `model(ids, attention_mask=torch.ones_like(ids),
    position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=count)`: with a mask of
    ones they leave the causal order to SDPA, without one they take a shard's positions for packed documents
    and build a mask of their own, which is refused here.

    Args:
        cp: how attention crosses the ranks.
        buffers: tensors of one length along their sequence dims, sharded in place and restored at the end.
        buffer_seq_dims: the sequence dim of each.
        no_restore_buffers: of these, the ones left as shards.
        mask: what may attend to what; default the causal order that each call asks for, over one document.
        model: named in the error if it never reaches SDPA.

    Yields:
        this rank's plan.

    Raises:
        PlanError: buffers that do not fit together; a call with what a shard cannot honour (an attn_mask, a
            dropout, another length, another causal order than `mask`'s, reentrant checkpointing); a module named
            as attention that makes no call, or has a window other than `mask`'s; positions counted within the
            shard; labels shifted within it; or no call at all.
    """
    length = _common_length(buffers, buffer_seq_dims)
    plans = {causal: cp.plan(length, replace(mask or AttentionMask(), causal=causal)) for causal in (True, False)}
    layout_plan = plans[mask.causal if mask else True]
    plans[not layout_plan.mask.causal] = cp.plan(length, plans[not layout_plan.mask.causal].mask, like=layout_plan)
    kept = no_restore_buffers or set()
    positions = [counts_positions(buffer, dim) for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)]
    whole = [buffer.detach().view(buffer.shape) for buffer in buffers]
    catcher = _Catcher(cp, plans, mask)
    try:
        with torch.no_grad():
            for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
                buffer.set_(layout_plan.shard(buffer, dim).contiguous())  # type: ignore[call-overload]
        shards = list(zip(buffers, buffer_seq_dims, strict=True))
        guard = Guard(layout_plan.local_tokens, length, shards, positions, mask, lambda: catcher.calls)
        catcher.guard = guard
        with _catching(catcher.attend), guard.watching():
            yield layout_plan
        if not catcher.calls:
            raise PlanError(
                f"{_name(model)} never called scaled_dot_product_attention{_implementation(model)}", fix=SDPA_FIX
            )
    finally:
        with torch.no_grad():
            for buffer, full in zip(buffers, whole, strict=True):
                if not any(buffer is other for other in kept):
                    buffer.set_(full)  # type: ignore[call-overload]


@contextmanager
def _catching(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Every call of the operator behind scaled_dot_product_attention goes to `attend`, in every thread.

    The operator is caught, not the Python function: modules hold the function under other names, and a
    recomputation runs in the threads of autograd.
    """
    library = torch.library.Library("aten", "IMPL")
    for key in KEYS:
        library.impl("scaled_dot_product_attention", attend, key)
    try:
        yield
    finally:
        library._destroy()


KEYS = ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA")  # the last two without autograd, in inference mode


class _Catcher:
    """Sends calls of scaled_dot_product_attention to the context-parallel attention."""

    guard: Guard

    def __init__(self, cp: ContextParallel, plans: dict[bool, Plan], mask: AttentionMask | None) -> None:
        self.cp, self.plans, self.mask, self.calls = cp, plans, mask, 0

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
        refusal = None
        try:
            self._check(query, key, value, attn_mask, dropout_p, is_causal)
        except PlanError as error:
            refusal = error
        if not self.calls:
            refusal = self._agree(refusal, query.device)
        if refusal:
            raise refusal
        self.calls += 1
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.cp.attention(q, k, v, self.plans[is_causal], scale=scale).transpose(1, 2)

    def _agree(self, refusal: PlanError | None, device: torch.device) -> PlanError | None:
        """At the first call, what any rank refuses: the others would wait for its keys."""
        plan = self.plans[True]
        refused = torch.tensor(float(refusal is not None), device=device)
        for group in plan.process_groups:
            refused = group.maximum(refused)
        if refusal or not refused:
            return refusal
        return PlanError("another rank refused this call; its message says why")

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
    ) -> None:
        """Raise PlanError at what a shard cannot honour."""
        if counted := self.guard.counted_positions():
            raise counted
        if attn_mask is not None:
            raise PlanError(
                f"scaled_dot_product_attention was given a mask {tuple(attn_mask.shape)}, which speaks of one shard",
                fix="describe it as context_parallel(..., mask=AttentionMask(...)) and let the model build none "
                "(Hugging Face models: pass attention_mask=torch.ones_like(input_ids))",
            )
        if dropout_p:
            raise PlanError(f"attention dropout of {dropout_p} is not available", fix="set it to 0")
        plan = self.plans[is_causal]
        if self.mask and self.mask.causal != is_causal:
            raise PlanError(f"the call has is_causal = {is_causal} and the mask causal = {self.mask.causal}")
        lengths = {x.shape[-2] for x in (query, key, value)}
        if query.ndim != 4 or lengths != {plan.local_tokens}:
            raise PlanError(
                f"scaled_dot_product_attention was called with q {tuple(query.shape)}, k {tuple(key.shape)}, and a "
                f"shard has {plan.local_tokens} tokens",
                fix="only self-attention over the sharded sequence, [B, H, S/P, D], can be caught",
            )
        if not torch.is_grad_enabled() and _in_reentrant_checkpoint():
            raise PlanError(
                "reentrant activation checkpointing would recompute attention without context parallelism",
                fix="use torch.utils.checkpoint with use_reentrant=False",
            )


def _in_reentrant_checkpoint() -> bool:
    """Whether a caller is the forward of a reentrant checkpoint, whose backward may run after the block."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


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


def _name(model: nn.Module | None) -> str:
    return type(model).__name__ if model is not None else "the model"


def _implementation(model: nn.Module | None) -> str:
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return f" (its attn_implementation is {chosen!r})" if chosen else ""
