"""Context parallelism for unmodified models: their scaled_dot_product_attention calls are intercepted.

Operations that are right on a whole sequence and wrong on a shard of it are refused.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from traceback import walk_stack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from torchtitan_cp.attention.api import ContextParallel, attend
from torchtitan_cp.attention.collectives import gather
from torchtitan_cp.attention.counting import CountTracker
from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.mask import UNBOUNDED, AttentionMask
from torchtitan_cp.attention.plan import Plan

# CPU and CUDA serve calls in inference mode, without autograd.
DISPATCH_KEYS = ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA")
_ATTENTION_MODULE = re.compile(r"(Attention|Attn)\d*$")
_TOKEN_MIXER_MODULE = re.compile(r"DeltaNet|DeltaAttention|LinearAttention|Mamba|RWKV|Retention|ShortConv|Recurrent")
_SHIFTS = (F.pad, Tensor.__getitem__, torch.roll, Tensor.roll)
_MAXIMA = (torch.max, torch.amax, Tensor.max, Tensor.amax)
_SDPA = torch._C._nn.scaled_dot_product_attention
SDPA_FIX = (
    "its ranks would each attend to their own shard only: choose an attention that goes through "
    "torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa' in Hugging Face models)"
)


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
    position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=count)`. Given a mask of
    ones, they leave the causal order to SDPA. Without one, they take jumps in a shard's positions for packed
    documents and build a mask, which is refused here.

    Args:
        cp: how attention crosses the ranks.
        buffers: tensors of one length along their sequence dims, sharded in place and restored at the end.
        buffer_seq_dims: the sequence dim of each.
        no_restore_buffers: buffers that stay shards after the block.
        mask: what may attend to what; by default the causal order of each call, over one document.
        model: named in the error if it never calls SDPA.

    Yields:
        This rank's plan.

    Raises:
        PlanError: buffers do not fit together; a call does something that a shard cannot honour (an attn_mask,
            dropout, another length, another causal order than `mask`'s, reentrant checkpointing, vmap); a module
            whose name says attention makes no call, has a window other than `mask`'s, or attends within chunks that
            are shorter than a document; a convolution or recurrence runs over the sequence; queries, keys or values
            depend on positions counted within the shard; labels are shifted within it; nothing calls SDPA.
    """
    length = _common_length(buffers, buffer_seq_dims)
    base_mask = mask or AttentionMask()
    plan = cp.plan(length, base_mask)
    plans = {causal: cp.plan(length, replace(base_mask, causal=causal), like=plan) for causal in (True, False)}
    sharded = list(zip(buffers, buffer_seq_dims, strict=True))
    block = _Block(plans, mask, sharded)
    whole = [buffer.detach().view(buffer.shape) for buffer in buffers]
    try:
        with torch.no_grad():
            for buffer, dim in sharded:
                buffer.set_(plan.shard(buffer, dim).contiguous())  # type: ignore[call-overload]
        with block.active():
            yield plan
        if not block.calls:
            raise _never_called(model)
    finally:
        with torch.no_grad():
            for buffer, full in zip(buffers, whole, strict=True):
                if not any(buffer is kept for kept in no_restore_buffers or ()):
                    buffer.set_(full)  # type: ignore[call-overload]


def _common_length(buffers: Sequence[Tensor], dims: Sequence[int]) -> int:
    """The length of all buffers along their sequence dims."""
    shapes = [tuple(buffer.shape) for buffer in buffers]
    if not buffers or len(buffers) != len(dims):
        raise PlanError(
            f"context_parallel has {len(buffers)} buffers and {len(dims)} sequence dims",
            fix="give at least one buffer, and one dim for each",
        )
    lengths = {shape[dim] if -len(shape) <= dim < len(shape) else 0 for shape, dim in zip(shapes, dims, strict=True)}
    if len(lengths) > 1 or 0 in lengths:
        raise PlanError(f"buffers {shapes} have no one length along dims {[*dims]}", fix="give each its sequence dim")
    if any(buffer.requires_grad for buffer in buffers):
        raise PlanError("a buffer requires grad and cannot be sharded in place", fix="shard it with plan.shard")
    return lengths.pop()


def _counts_positions(buffer: Tensor, dim: int) -> bool:
    """Whether a buffer's integers rise by one along `dim`, or begin anew at a document's start.

    After a document of one token, two starts follow each other.
    """
    if buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool:
        return False
    steps, rises = buffer.diff(dim=dim), buffer.diff(dim=dim) == 1
    starts = (steps < 0) | ((steps == 0) & (buffer.narrow(dim, 1, steps.shape[dim]) == buffer.min()))
    return bool((rises | starts).all() and rises.any())


def _never_called(model: nn.Module | None, action: str = "") -> PlanError:
    """The error for a model or module that never called SDPA; `action` says what it did instead."""
    name = "the model" if model is None else type(model).__name__
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    how = f" (its attn_implementation is {chosen!r})" if chosen else ""
    return PlanError(f"{name} {action}never called scaled_dot_product_attention{how}", fix=SDPA_FIX)


class _Block(TorchFunctionMode):
    """Sends SDPA calls to the context-parallel attention, and refuses what is wrong on a shard.

    Args:
        plans: by whether a call is causal.
        mask: the block's; None for the causal order of each call.
        buffers: (buffer, sequence dim), before they are sharded.

    Attributes:
        calls: how many calls were intercepted so far.
        longest: the length of the longest document.
        last_position: the largest position of each buffer that holds positions, by id.
        sequence_dims: the sequence dim of each other buffer, by id.
        counter: name of a function whose count of a shard's tokens has reached attention, if one has.
        read_positions: whether a function has read a buffer of positions.
        calls_before: per attention module that runs, how many calls there were before it.
        run_sdpa: SDPA, at which torch.compile breaks a graph: it would keep this block's plan, or know of no block.
    """

    def __init__(self, plans: dict[bool, Plan], mask: AttentionMask | None, buffers: list[tuple[Tensor, int]]) -> None:
        super().__init__()
        self.plans, self.plan, self.mask, self.calls = plans, plans[True], mask, 0
        spans = (span for row in self.plan.mask.documents(self.plan.sequence_length) for span in row)
        self.longest = max((stop - start for start, stop in spans), default=0)
        self.last_position = {id(x): int(x.max()) for x, dim in buffers if _counts_positions(x, dim)}
        self.sequence_dims = {id(x): dim % x.ndim for x, dim in buffers if id(x) not in self.last_position}
        self.counts = CountTracker(self.plan.local_tokens, (buffer for buffer, _ in buffers))
        self.counter, self.read_positions = "", False
        self.calls_before: dict[nn.Module, int] = {}
        self.run_sdpa = torch.compiler.disable(_SDPA)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Intercept and check.

        What is replaced is the operator behind scaled_dot_product_attention, in every thread, not the Python function:
        modules may hold the function under other names, and a recomputation runs in autograd's threads.
        """
        with ExitStack() as stack:
            library = torch.library.Library("aten", "IMPL")
            stack.callback(library._destroy)
            for key in DISPATCH_KEYS:
                library.impl("scaled_dot_product_attention", self._attend, key)
            library.impl("scaled_dot_product_attention", _refuse_vmap, "FuncTorchVmapMode")
            if self.plan.ranks > 1:
                stack.callback(register_module_forward_pre_hook(self._enter).remove)
                stack.callback(register_module_forward_hook(self._leave).remove)
            stack.enter_context(self)  # on one rank for compiled models only: see `run_sdpa`
            yield

    def _attend(
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
        if self.mask and self.plan.local_tokens == 1 < self.plan.ranks:
            is_causal = self.mask.causal  # models call attention of a single token not causal, as it has one key
        refusal = self._refusal(query, key, value, attn_mask, dropout_p, is_causal)
        if not self.calls:
            # If one rank refuses the first call, all ranks raise: the others would wait for its keys forever.
            refused = torch.tensor(refusal is not None, device=query.device, dtype=torch.uint8)
            if gather(refused, self.plan.process_groups).any() and not refusal:
                refusal = PlanError("another rank refused this call; its message says why")
        if refusal:
            raise refusal
        self.calls += 1
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attend(q, k, v, self.plans[is_causal], scale=scale).transpose(1, 2)

    def _refusal(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
    ) -> PlanError | None:
        """Why a shard cannot honour a call, or None."""
        local_tokens = self.plan.local_tokens
        if self.counter and not self.read_positions:
            return PlanError(
                f"{self.counter} counted {local_tokens} tokens before attention: positions within a rank's shard",
                fix="put position ids of the full sequence among the buffers, and give them to the model",
            )
        if attn_mask is not None:
            return PlanError(
                f"scaled_dot_product_attention was given a mask {tuple(attn_mask.shape)}, which covers one shard only",
                fix="describe it as context_parallel(..., mask=AttentionMask(...)) and let the model build none "
                "(Hugging Face models: pass attention_mask=torch.ones_like(input_ids); compile layers, not the model)",
            )
        if local_tokens == 1 < self.plan.ranks and not self.mask:
            return PlanError(
                "a shard of one token does not show whether attention is causal",
                fix="say so: context_parallel(..., mask=AttentionMask())",
            )
        if dropout_p:
            return PlanError(f"attention dropout of {dropout_p} is not available", fix="set it to 0")
        if self.mask and self.mask.causal != is_causal:
            return PlanError(f"the call has is_causal = {is_causal} and the mask causal = {self.mask.causal}")
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, local = kwargs or {}, self.plan.local_tokens
        call = self.run_sdpa if func is _SDPA else func
        if self.plan.ranks == 1:
            return call(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func is not _SDPA and ("attention" in name or "attn" in name):
            raise PlanError(f"{name} was called, which sees a rank's own tokens only", fix=SDPA_FIX)
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if func in (torch.lstm, torch.gru) or (func in (F.conv1d, F.conv_transpose1d) and weight.shape[-1] > 1):
            raise _mixes_neighbours(name)
        if func is _SDPA and torch._C._current_graph_task_id() == -1:  # not recomputed in backward
            operands = (*args[:3], *(kwargs.get(operand) for operand in ("query", "key", "value")))
            self.counter = self.counter or self.counts.counter_of(operands)
        out = call(*args, **kwargs)
        self.counts.follow(func, args, kwargs, out)
        self.read_positions |= any(id(x) in self.last_position for x in (*args, *kwargs.values()))
        if func in _MAXIMA and len(args) == 1 and not kwargs:
            base = args[0] if args[0]._base is None else args[0]._base
            if id(base) in self.last_position:  # RoPE whose frequencies depend on the sequence's length
                return torch.full_like(out, self.last_position[id(base)])
        if func in _SHIFTS and args and id(args[0]) in self.sequence_dims:
            dim = self.sequence_dims[id(args[0])]
            if "roll" in name or (out.ndim == args[0].ndim and out.shape[dim] != local):
                raise PlanError(
                    f"{name} shifts or cuts a buffer along its sequence, which is wrong at the edges of a shard",
                    fix="do it before the block, to the full sequence (Hugging Face models: give shift_labels too)",
                )
        return out

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = type(module).__name__
        # Another library's function may read a convolution's weight, so the module that owns it is refused.
        if _TOKEN_MIXER_MODULE.search(name) or any(map(_is_sequence_layer, (module, *module.children()))):
            raise _mixes_neighbours(name)
        if _ATTENTION_MODULE.search(name):
            self.calls_before[module] = self.calls
            self._check_reach(module)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.calls_before.pop(module, None) == self.calls:
            raise _never_called(module, "ran and ")

    def _check_reach(self, module: nn.Module) -> None:
        """Refuse a module that has chunks, or another window than the mask's.

        transformers restricts a layer only where it is shorter than the tokens that it sees, here those of a shard.
        """
        name, config = type(module).__name__, getattr(module, "config", None)
        kind, causal = _kind_of(module), getattr(module, "is_causal", True) is not False
        chunk = getattr(config, "attention_chunk_size", None)
        if kind in ("", "chunked_attention") and chunk and chunk < self.longest:
            raise PlanError(
                f"{name} has attention_chunk_size = {chunk}, and this block has a document of {self.longest} tokens",
                fix="choose an attention_chunk_size that no document exceeds, or train without context parallelism",
            )
        declared = getattr(config, "sliding_window", None)
        window = None if kind == "full_attention" else getattr(module, "sliding_window", declared)
        if not causal and window:  # the module's may count the query itself, the config's never does
            window = declared or window - 1
        own, others, blocks = (
            self._limits(sides, causal)
            for sides in (_sides(window, causal), _sides(declared, causal), self.plan.mask.window)
        )
        if own != blocks and (own, others) != (UNBOUNDED, UNBOUNDED):
            has = "none" if blocks == UNBOUNDED else blocks[0] + 1 if causal else blocks
            raise PlanError(
                f"{name} has sliding_window = {window}, and this block's mask has {has}",
                fix=f"give context_parallel(..., mask=AttentionMask(window={_sides(window, causal)})); layers with "
                "different windows cannot share a block",
            )

    def _limits(self, window: tuple[int, int], causal: bool) -> tuple[int, int]:
        """A window (left, right), -1 where it restricts nothing within the documents."""
        left, right = (side if side < self.longest - 1 else -1 for side in window)
        return left, -1 if causal else right


def _kind_of(module: nn.Module) -> str:
    """The entry of transformers' `layer_types` for an attention module; "": it has none."""
    kinds, layer = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[layer] if kinds and isinstance(layer, int) and layer < len(kinds) else ""


def _sides(window: int | None, causal: bool) -> tuple[int, int]:
    """transformers' window as (left, right). Only a causal one counts the query itself."""
    if not window:
        return UNBOUNDED
    return (window - 1, -1) if causal else (window, window)


def _in_reentrant_checkpoint() -> bool:
    """Whether the caller is within the forward of a reentrant checkpoint, whose backward may run after the block."""
    return any(frame.f_code is CheckpointFunction.forward.__code__ for frame, _ in walk_stack(sys._getframe()))


def _is_sequence_layer(module: nn.Module) -> bool:
    """Whether a layer is a convolution over more than one token, or a recurrence."""
    return isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1)


def _refuse_vmap(*operands: Tensor, **options: object) -> Tensor:
    """Take the place of what SDPA does under vmap: it calls a kernel on a rank's own tokens."""
    raise PlanError(
        "scaled_dot_product_attention was called under torch.vmap, which would attend within a rank's own shard only",
        fix="make what is mapped a part of the batch or of the heads",
    )


def _mixes_neighbours(name: str) -> PlanError:
    return PlanError(
        f"{name} mixes neighbouring tokens, and a rank sees only those of its shard",
        fix="use a model whose layers mix tokens by attention alone, or train it without context parallelism",
    )
