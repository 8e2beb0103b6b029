"""Activation checkpointing of blocks, full or selective, and MLPs in tiles.

The functions here wrap forwards, not modules, so that parameters keep their names.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchtitan_cp.attention import OPERATORS
from torchtitan_cp.parallel.nf4 import PRODUCT as NF4_PRODUCT
from torchtitan_cp.parallel.offload import HostMemory, restore, storage_of

P = ParamSpec("P")
Result = TypeVar("Result")
Operator = Callable[..., object]  # of torch
Forward = Callable[[Tensor], Tensor]
Contexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]

# Operators whose outputs cost more to compute than to keep; what lies between them is recomputed.
PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "_grouped_mm")} | {NF4_PRODUCT}


def checkpointed(
    forward: Callable[P, Result], kind: str, host: HostMemory | None, *, compiled: bool
) -> Callable[P, Result]:
    """A block's forward that saves its input, and runs again in backward.

    Args:
        kind: `full` saves the block's input alone; `attention_saved` also the outputs of attention and gated delta
            rules, so that they never run twice; `selective` also every matrix product.
        host: holds what `attention_saved` and `selective` keep, instead of the device.
        compiled: the block will be compiled. Then tracing decides what it saves, and leaves no write in place.
    """
    if kind == "full":
        return recomputed(forward)
    if compiled:
        saved = [*OPERATORS, *(PRODUCTS if kind == "selective" else ())]
        return recomputed(forward, partial(create_selective_checkpoint_contexts, saved))
    return recomputed(forward, partial(_saving_contexts, partial(_is_kept, kind), host))


def recomputed(forward: Callable[P, Result], contexts: Contexts | None = None) -> Callable[P, Result]:
    """A forward that saves its inputs and what `contexts` selects (default: nothing), and runs again in backward."""
    # torch.compile does not take torch's own default of context_fn.
    options: dict[str, Contexts] = {"context_fn": contexts} if contexts else {}
    rerun: Callable[..., Result] = checkpoint  # its own types leave no keywords to the forward

    def run(*inputs: P.args, **named: P.kwargs) -> Result:
        return rerun(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options, **named)

    return run


def _saving_contexts(
    is_kept: Callable[[Operator], bool], host: HostMemory | None
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For `checkpoint(context_fn=...)`: keep the outputs of some operators, and do not compute them again.

    Some models (gpt-oss, Gemma 3n) write to these outputs in place, and write again when the block is recomputed.
    torch's own contexts keep the written values, or fail; here a copy is kept. A write to what another operator saved
    for its backward goes unnoticed, as under `full`.
    """
    outputs = deque[tuple[Operator, object]]()
    by_storage: dict[int, list[_KeptOutput]] = {}

    def save(function: Operator, *args: object, **named: object) -> object:
        if _is_mutable(function):
            for tensor in _written_tensors(function, args, named):
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

    def reuse(function: Operator, *args: object, **named: object) -> object:
        if not is_kept(function):
            return function(*args, **named)
        producer, kept = outputs.popleft() if outputs else (None, None)
        if producer is not function:
            raise RuntimeError("backward runs twice, or a block's recomputation differs from its forward")
        return tree_map(_KeptOutput.restore, kept)

    return _Intercept(save), _Intercept(reuse)


class _KeptOutput:
    """An operator's output, on the device or in host memory, whatever the block writes to it later."""

    def __init__(self, host: HostMemory | None, tensor: Tensor) -> None:
        self.host, self.storage = host, StorageWeakRef(storage_of(tensor))  # while held, no other has its number
        # The output itself would hold its graph. This dispatch key, which a dispatch mode switches off, makes the
        # detached tensor share its version counter.
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


@cache  # called for every operator of every step, and slow
def _is_mutable(function: Operator) -> bool:
    """Whether an operator writes to any of its arguments."""
    schema = getattr(function, "_schema", None)
    return schema is not None and schema.is_mutable


def _written_tensors(function: Operator, args: Sequence[object], named: dict[str, object]) -> list[Tensor]:
    """The tensors that a mutable operator writes to."""
    arguments = function._schema.arguments  # type: ignore[attr-defined]
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | named
    written = [values.get(x.name) for x in arguments if x.alias_info and x.alias_info.is_write]
    return [x for x in tree_leaves(written) if isinstance(x, Tensor)]


class _Intercept(TorchDispatchMode):
    """Calls a function in place of each operator."""

    def __init__(self, handle: Callable[..., object]) -> None:
        super().__init__()
        self.handle = handle

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions inside run compiled, as torch's own contexts do."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's default wrapper would double the cost of each call."""
        return False

    def __torch_dispatch__(
        self,
        function: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return self.handle(function, *args, **(kwargs or {}))


class Tiles:
    """Whether a tile of an MLP is running, whose products its block does not save."""

    running = False


def _is_kept(kind: str, operator: Operator) -> bool:
    return operator in OPERATORS or (kind == "selective" and operator in PRODUCTS and not Tiles.running)


def tiled(forward: Forward, tiles: int, *, gathers: bool = False) -> Forward:
    """A block's MLP and its norm, `[B, s, E] -> [B, s, E]`, run on one tile of the sequence after another.

    Only the input is saved, so the wide activations exist for one tile at a time, forward and backward. A block that is
    recomputed and ends with its MLP does not run it again for that. The block's weights stay gathered meanwhile, and
    gradients are reduced once for all tiles. Source: ALST (Bekman et al., 2025).

    Args:
        gathers: FSDP gathers weights inside the MLP, those of experts, for each tile. It counts on a forward for every
            backward, so these tiles run again with their block too.
    """
    run_tile = recomputed(forward)

    def run(hidden: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()  # then the tiles' own recomputation decides what is saved
        Tiles.running = not compiling
        try:
            if compiling or gathers:
                return torch.cat([run_tile(part) for part in _split(hidden, tiles)], 1)
            has_gradient = torch.zeros((), requires_grad=torch.is_grad_enabled())
            saved = _TilesBackward.apply(hidden, has_gradient, forward, tiles)
            return _TilesForward.apply(saved, hidden.detach(), forward, tiles)
        finally:
            Tiles.running = False

    return run


def _split(hidden: Tensor, tiles: int) -> tuple[Tensor, ...]:
    return hidden.split(-(-hidden.shape[1] // tiles), 1)


class _OfTiles(Protocol):
    saved_tensors: tuple[Tensor, ...]
    forward: Forward
    tiles: int

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _TilesBackward(torch.autograd.Function):
    """Saves the input of tiles, and runs them in backward. Its output stands for theirs in the graph.

    Apart from their forward, so that a recomputed block, which ends when all that it saves is there, ends before it.
    """

    @staticmethod
    def forward(ctx: _OfTiles, hidden: Tensor, has_gradient: Tensor, forward: Forward, tiles: int) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.forward, ctx.tiles = forward, tiles
        return hidden.new_zeros(()).expand(hidden.shape)

    @staticmethod
    def backward(ctx: _OfTiles, dout: Tensor) -> tuple[Tensor, None, None, None]:
        gradients = list[Tensor]()
        parts = [_split(x, ctx.tiles) for x in (*ctx.saved_tensors, dout)]
        for part, dpart in reversed([*zip(*parts, strict=True)]):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                out = ctx.forward(leaf)
            torch.autograd.backward(out, dpart)  # adds to the gradients of the weights
            assert leaf.grad is not None
            gradients.append(leaf.grad)
        return torch.cat(gradients[::-1], 1), None, None, None


class _TilesForward(torch.autograd.Function):
    """Runs tiles without saving anything; see `_TilesBackward`, whose output is `saved`."""

    @staticmethod
    def forward(ctx: object, saved: Tensor, hidden: Tensor, forward: Forward, tiles: int) -> Tensor:
        return torch.cat([forward(part) for part in _split(hidden, tiles)], 1)

    @staticmethod
    def backward(ctx: object, dout: Tensor) -> tuple[Tensor, None, None, None]:
        return dout, None, None, None
