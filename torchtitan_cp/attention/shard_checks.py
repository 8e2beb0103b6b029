"""What a model does in a context_parallel block that is right on a whole sequence and wrong on a shard of it."""

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
_COUNTERS = (torch.arange, torch.cumsum, Tensor.cumsum)
_SHIFTS = (F.pad, Tensor.__getitem__, torch.roll, Tensor.roll)
_RECURRENCES = (torch.lstm, torch.gru)
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


class Guard(TorchFunctionMode):
    """Watches the functions and modules of a block.

    Args:
        local_tokens: S/P; sequence_length: S.
        buffers: shards, with their sequence dims; positions are told from other buffers by their values.
        positions: for each buffer, whether it counts positions.
        mask: of the block, None for what each call asks for.
        calls: how many SDPA calls were caught so far.
    """

    def __init__(
        self,
        local_tokens: int,
        sequence_length: int,
        buffers: Sequence[tuple[Tensor, int]],
        positions: Sequence[bool],
        mask: AttentionMask | None,
        calls: Callable[[], int],
    ) -> None:
        super().__init__()
        self.local, self.length, self.mask, self.calls = local_tokens, sequence_length, mask, calls
        pairs = list(zip(buffers, positions, strict=True))
        self.positions = {id(buffer) for (buffer, _), counts in pairs if counts}
        self.dims = {id(buffer): dim % buffer.ndim for (buffer, dim), counts in pairs if not counts}
        self.counted, self.read_positions = "", False
        self.entered: dict[nn.Module, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raise PlanError at what a shard would get wrong, within the block."""
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
        out = func(*args, **kwargs)
        self.read_positions |= any(id(x) in self.positions for x in (*args, *kwargs.values()))
        if func in _COUNTERS and out.shape[-1:] == (self.local,):
            if self.local > 1 and bool((out[..., -1] - out[..., 0] == self.local - 1).all()):
                self.counted = name
        elif func in _SHIFTS and args and id(args[0]) in self.dims:
            self._check_shift(name, args[0], out)
        elif func in _RECURRENCES or (func is F.conv1d and args[1].shape[-1] > 1):
            raise PlanError(
                f"{name} mixes neighbouring tokens and saw a shard's only", fix="use attention alone for it"
            )
        return out

    def _check_shift(self, name: str, buffer: Tensor, out: Tensor) -> None:
        dim = self.dims[id(buffer)]
        if "roll" in name or (out.ndim == buffer.ndim and out.shape[dim] != self.local):
            raise PlanError(
                f"{name} shifts or cuts a buffer along its sequence, which is wrong at the edges of a shard",
                fix="do it before the block, to the full sequence (Hugging Face models: give shift_labels too)",
            )

    def counted_positions(self) -> PlanError | None:
        """What is wrong if positions were counted within the shard, and none were read from a buffer."""
        if not self.counted or self.read_positions or self.local == self.length:
            return None
        return PlanError(
            f"{self.counted} counted {self.local} tokens before attention: positions within a rank's shard",
            fix="put position ids of the full sequence among the buffers, and give them to the model",
        )

    def _enter(self, module: nn.Module, args: Any) -> None:
        if _ATTENTION_MODULE.search(type(module).__name__):
            self.entered[module] = self.calls()
            self._check_window(module)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.entered.pop(module, None) == self.calls():
            chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
            how = f" (its attn_implementation is {chosen!r})" if chosen else ""
            raise PlanError(
                f"{type(module).__name__} ran and never called scaled_dot_product_attention{how}", fix=SDPA_FIX
            )

    def _check_window(self, module: nn.Module) -> None:
        """transformers makes a window's mask only where it is shorter than the tokens at hand, here a shard's."""
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
