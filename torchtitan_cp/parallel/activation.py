"""Activation checkpointing of blocks, full or selective, and MLPs in tiles.

Forwards are replaced, not modules, so that parameters keep their names.
"""

from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan_cp.attention import OPERATORS
from torchtitan_cp.parallel.offload import HostMemory, restore, storage_of

Forward = Callable[..., Any]

# Operators whose outputs cost more to compute than to keep; what lies between them is recomputed.
PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "_grouped_mm")}


def apply_activation_checkpointing(model: nn.Module, kind: str, host: HostMemory | None, *, compiled: bool) -> None:
    """Save each block's input, and recompute the block in backward.

    Args:
        kind: `none` saves everything; `full` the block's input alone; `attention_saved` also what attention and
            gated delta rules give, so that they never run twice; `selective` also every matrix product.
        host: holds what `attention_saved` and `selective` keep, instead of the device.
        compiled: the blocks will be; what they save is decided when they are traced, and no write in place is left.
    """
    if kind == "none":
        return
    contexts: Callable[[], Any] | None = None
    if compiled and kind != "full":
        contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kind))
    elif kind != "full":
        contexts = partial(_saving_contexts, partial(_is_kept, kind), host)
    for layer in model.layers.values():  # type: ignore[operator]
        layer.forward = recomputed(layer.forward, contexts)


def recomputed(forward: Forward, contexts: Callable[[], Any] | None = None) -> Forward:
    """A forward that saves its inputs, and inside it what `contexts` selects; nothing by default."""
    options: dict[str, Any] = {"context_fn": contexts} if contexts else {}

    def run(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options, **named)

    return run


def _saving_contexts(
    is_kept: Callable[[Any], bool], host: HostMemory | None
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For `checkpoint(context_fn=...)`: outputs of some operators are kept, and not computed again.

    Models write to them in place, and write again when they are recomputed. torch's own contexts keep what was
    written, or fail. A write to what another operator saved for its backward goes unnoticed, as under `full`.
    """
    outputs = deque[tuple[Any, Any]]()
    by_storage: dict[int, list[_KeptOutput]] = {}

    def save(function: Any, *args: Any, **named: Any) -> Any:
        if _is_mutable(function):
            for tensor in _written(function, args, named):
                for kept in by_storage.pop(storage_of(tensor)._cdata, ()):
                    kept.before_write(tensor)
        result = function(*args, **named)
        if is_kept(function):
            outputs.append((function, tree_map(keep, result)))
        return result

    def keep(tensor: Tensor) -> _KeptOutput:
        kept = _KeptOutput(host, tensor)
        by_storage.setdefault(storage_of(tensor)._cdata, []).append(kept)
        return kept

    def reuse(function: Any, *args: Any, **named: Any) -> Any:
        if not is_kept(function):
            return function(*args, **named)
        kept_of, kept = outputs.popleft() if outputs else (None, None)
        if kept_of is not function:
            raise RuntimeError("backward runs twice, or a block's recomputation differs from its forward")
        return tree_map(_KeptOutput.restore, kept)

    return _Intercept(save), _Intercept(reuse)


class _KeptOutput:
    """What an operator gave, on the device or in host memory, whatever the block writes to it later."""

    def __init__(self, host: HostMemory | None, tensor: Tensor) -> None:
        self.host, self.storage = host, StorageWeakRef(storage_of(tensor))  # while held, no other has its number
        # The graph's own would hold the graph. With this key it shares the version, which a dispatch mode has off.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            tensor = tensor.detach()
        self.value = host.offload(tensor) if host else tensor
        self.version = tensor._version

    def before_write(self, tensor: Tensor) -> None:
        """Copy the kept tensor before it is written to, or wait until it is copied to the host."""
        if isinstance(self.value, Tensor):
            self.value = self.value.clone()
            self.version = self.value._version
        elif self.host:
            self.host.wait_for(tensor)

    def restore(self) -> Tensor:
        if isinstance(self.value, Tensor) and self.value._version != self.version:
            raise RuntimeError("a block's matrix product, kept for its backward, was written to in place")
        return restore(self.value)


@cache  # operators live as long as the process
def _is_mutable(function: Any) -> bool:
    """Whether an operator writes to any of its arguments."""
    return hasattr(function, "_schema") and function._schema.is_mutable


def _written(function: Any, args: Any, named: Any) -> list[Tensor]:
    """Tensors among an operator's arguments that it writes to."""
    arguments = function._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | named
    written = [given.get(x.name) for x in arguments if x.alias_info and x.alias_info.is_write]
    return [x for x in tree_leaves(written) if isinstance(x, Tensor)]


class _Intercept(TorchDispatchMode):
    """Hands each call of an operator to a function, instead of making it."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        super().__init__()
        self.handle = handle

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions within run compiled, as under torch's own contexts."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to: what torch would wrap each call in costs as much as the call."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handle(function, *args, **(kwargs or {}))


class Tiles:
    """Whether a tile of an MLP is running: its block does not save its products."""

    running = False


def _is_kept(kind: str, operator: Any) -> bool:
    return operator in OPERATORS or (kind == "selective" and operator in PRODUCTS and not Tiles.running)


def _policy(kind: str, _context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(kind, operator) else CheckpointPolicy.PREFER_RECOMPUTE


def tile_mlps(model: nn.Module, tiles: int) -> None:
    """Run each block's MLP and its norm on one tile of the sequence after the other.

    Only a tile's input is saved, so the wide activations exist for one tile at a time, forward and backward. A block's
    weights stay gathered meanwhile, except for experts that are sharded apart: these are gathered for each tile.
    Gradients are reduced once for all tiles. Source: ALST (Bekman et al., 2025).
    """
    if tiles > 1:
        for layer in model.layers.values():  # type: ignore[operator]
            layer.mlp = tiled(layer.mlp, tiles)


def tiled(forward: Callable[[Tensor], Tensor], tiles: int) -> Callable[[Tensor], Tensor]:
    """A function of each token alone, `[B, s, E] -> [B, s, E]`, a tile at a time."""
    run_tile = recomputed(forward)

    def run(hidden: Tensor) -> Tensor:
        parts = hidden.split(-(-hidden.shape[1] // tiles), 1)
        if torch.compiler.is_compiling():  # the tiles' own recomputation decides then
            return torch.cat([run_tile(part) for part in parts], 1)
        Tiles.running = True
        try:
            return torch.cat([run_tile(part) for part in parts], 1)
        finally:
            Tiles.running = False

    return run
