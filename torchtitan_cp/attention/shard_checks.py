"""Refuses what is right on a whole sequence and wrong on a shard of it, in a context_parallel block."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.mask import AttentionMask

_ATTENTION_MODULE = re.compile(r"(Attention|Attn)\d*$")
_TOKEN_MIXER_MODULE = re.compile(r"DeltaNet|DeltaAttention|LinearAttention|Mamba|RWKV|Retention|ShortConv|Recurrent")
_COUNTERS = (torch.arange, torch.cumsum, Tensor.cumsum)
_SHIFTS = (F.pad, Tensor.__getitem__, torch.roll, Tensor.roll)
_RECURRENCES = (torch.lstm, torch.gru)
_CONVOLUTIONS = (F.conv1d, F.conv_transpose1d)
_SDPA = torch._C._nn.scaled_dot_product_attention
SDPA_FIX = (
    "its ranks would each attend to their own shard only: choose an attention that goes through "
    "torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa' in Hugging Face models)"
)


def counts_positions(buffer: Tensor, dim: int) -> bool:
    """Whether a buffer's integers rise by one along `dim`, or fall back at a document's start."""
    if buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool:
        return False
    steps = buffer.diff(dim=dim)
    return bool(((steps == 1) | (steps < 0)).all())


def never_called(model: nn.Module | None, action: str = "") -> PlanError:
    """The error for a model or module that never called SDPA; `action` says what it did instead."""
    name = "the model" if model is None else type(model).__name__
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    how = f" (its attn_implementation is {chosen!r})" if chosen else ""
    return PlanError(f"{name} {action}never called scaled_dot_product_attention{how}", fix=SDPA_FIX)


class ShardChecks(TorchFunctionMode):
    """Checks the functions and modules that run in a block.

    Args:
        local_tokens: S/P; sequence_length: S.
        buffers: shards, each with its sequence dim and whether its values count positions.
        mask: of the block, None for the causal order of each call.
        calls: returns how many SDPA calls were intercepted so far.
    """

    def __init__(
        self,
        local_tokens: int,
        sequence_length: int,
        buffers: Sequence[tuple[Tensor, int, bool]],
        mask: AttentionMask | None,
        calls: Callable[[], int],
    ) -> None:
        super().__init__()
        self.local, self.length, self.mask, self.calls = local_tokens, sequence_length, mask, calls
        self.positions = {id(buffer) for buffer, _, counts in buffers if counts}
        self.dims = {id(buffer): dim % buffer.ndim for buffer, dim, counts in buffers if not counts}
        self.counted, self.read_positions = "", False
        self.entered: dict[nn.Module, int] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Raise PlanError within the block at what a shard would get wrong."""
        if self.local == self.length:
            yield
            return
        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is not _SDPA and ("attention" in name or "attn" in name):
            raise PlanError(f"{name} was called, which sees a rank's own tokens only", fix=SDPA_FIX)
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if func in _RECURRENCES or (func in _CONVOLUTIONS and weight.shape[-1] > 1):
            raise _mixes_neighbours(name)
        out = func(*args, **kwargs)
        self.read_positions |= any(id(x) in self.positions for x in (*args, *kwargs.values()))
        if func in _COUNTERS and out.shape[-1:] == (self.local,):
            if self.local > 1 and bool((out[..., -1] - out[..., 0] == self.local - 1).all()):
                self.counted = name
        elif func in _SHIFTS and args and id(args[0]) in self.dims:
            dim = self.dims[id(args[0])]
            if "roll" in name or (out.ndim == args[0].ndim and out.shape[dim] != self.local):
                raise PlanError(
                    f"{name} shifts or cuts a buffer along its sequence, which is wrong at the edges of a shard",
                    fix="do it before the block, to the full sequence (Hugging Face models: give shift_labels too)",
                )
        return out

    def counted_positions(self) -> PlanError | None:
        """The error if positions were counted within the shard and none were read from a buffer."""
        if not self.counted or self.read_positions or self.local == self.length:
            return None
        return PlanError(
            f"{self.counted} counted {self.local} tokens before attention: positions within a rank's shard",
            fix="put position ids of the full sequence among the buffers, and give them to the model",
        )

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = type(module).__name__
        # A convolution's weight may go to a function of another library, so its owner is refused.
        if _TOKEN_MIXER_MODULE.search(name) or any(map(_is_sequence_layer, (module, *module.children()))):
            raise _mixes_neighbours(name)
        if _ATTENTION_MODULE.search(name):
            self.entered[module] = self.calls()
            self._check_window(module)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.entered.pop(module, None) == self.calls():
            raise never_called(module, "ran and ")

    def _check_window(self, module: nn.Module) -> None:
        """transformers applies a window only if it is shorter than the tokens it sees, which are a shard's here."""
        config = getattr(module, "config", None)
        wanted = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
        left = self.mask.window[0] if self.mask else -1
        given = left + 1 if 0 <= left < self.length - 1 else None
        if wanted != given and wanted and (wanted < self.length or given):
            raise PlanError(
                f"{type(module).__name__} has sliding_window = {wanted}, and the mask of this block "
                + (f"{given}" if given else "none"),
                fix="give context_parallel(..., mask=AttentionMask(window=(sliding_window - 1, -1))); layers with "
                "different windows cannot share a block",
            )


def _is_sequence_layer(module: nn.Module) -> bool:
    """Whether a layer is a convolution over more than one token, or a recurrence."""
    return isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1)


def _mixes_neighbours(name: str) -> PlanError:
    return PlanError(
        f"{name} mixes neighbouring tokens, and a rank sees only those of its shard",
        fix="use a model whose layers mix tokens by attention alone, or train it without context parallelism",
    )
