"""A job of any size in one process, without its tensors: a process group that sends nothing, and tensors without data.

Everything here leans on internals of torch that its own tests and tools use; this file is the only one that does.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from torchtitan_cp.attention import OPERATOR
from torchtitan_cp.attention.operator import attention, attention_backward

# The operator's own code, which without data and a device would be passed over.
OPENED: dict[Any, Callable[..., Any]] = {
    OPERATOR: attention._init_fn,
    torch.ops.torchtitan_cp.attention_backward.default: attention_backward._init_fn,
}

# Values that are themselves a part of the key under which a result is remembered.
PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
# Namespaces whose operations give new tensors, views, or what they were given, and do nothing else.
REMEMBERED = ("aten", "prims", "_c10d_functional")
# Marks of operations whose result the shapes do not decide, or that change what they were given.
UNKNOWABLE = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}


@contextmanager
def fake_job(ranks: int, rank: int) -> Iterator[None]:
    """Be `rank` of a job of `ranks`, whose collectives return at once and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # What DTensor remembers of an operation holds the meshes, and so the groups, of this job.
        _clear_sharding_prop_cache()


class Output(NamedTuple):
    """An operation's result: a tensor of its own, or a view of one of its tensors without data.

    Attributes:
        shape, stride, dtype, device: as of torch.
        viewed: which of the operation's tensors it is a view of; None: it has a storage of its own.
        offset: where in that storage it begins, in elements.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    viewed: int | None
    offset: int


# Of an operation: its result or results; the number of the tensor that it hands back; None: to be asked each time.
Known = tuple[Output, ...] | Output | int | None


class WithoutData(FakeTensorMode):
    """New tensors have shapes and no data. What is asked of real ones alone is computed: meshes, labels, handles.

    Results of an operation on the same shapes are made anew from what they were the first time: layers are alike, and
    torch's own cache of this kind takes most of a dry run's time.
    """

    def __init__(self) -> None:
        # A real tensor beside others without data is taken for one of them.
        super().__init__(allow_non_fake_inputs=True)
        self.known: dict[Any, Known] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # What the host reads: flags are off, counts are one (an optimizer's step, which divides).
            return False if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.bincount.default and isinstance(args[0], FakeTensor):
            return _dealt_evenly(args[0].numel(), *args[2:], **(kwargs or {}))
        # Most operations tell by their first argument; looking through all of them costs more than many of them.
        if not (args and isinstance(args[0], FakeTensor)):
            tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
            if tensors and not any(isinstance(x, FakeTensor) for x in tensors):
                return func(*args, **(kwargs or {}))
        return self._result(func, types, args, kwargs or {})

    def _result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """An operation's result, remembered where nothing but the shapes decides it."""
        tensors: list[FakeTensor] = []
        try:
            key = (func, _shapes(args, tensors), _shapes(tuple(kwargs.items()), tensors))
            known = self.known[key]
        except _NotShapesError:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except KeyError:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self.known[key] = _learn(func, result, tensors)
            return result
        if known is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(known, Output):
            return self._make(known, tensors)
        if isinstance(known, int):
            return tensors[known]
        return tuple(self._make(output, tensors) for output in known)

    def _make(self, output: Output, tensors: list[FakeTensor]) -> FakeTensor:
        empty = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        if output.viewed is not None:
            storage = tensors[output.viewed].untyped_storage()
            empty.set_(storage, output.offset, output.shape, output.stride)
        return FakeTensor(self, empty, output.device)


class _NotShapesError(Exception):
    """An argument of which more counts than shapes and plain values."""


def _shapes(x: Any, tensors: list[FakeTensor]) -> Any:
    """What of arguments decides the shape of a result; its tensors are added to `tensors`, in order."""
    if isinstance(x, FakeTensor):
        if x.constant is not None:
            raise _NotShapesError
        tensors.append(x)
        return x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device
    if isinstance(x, (list, tuple)):
        return tuple([_shapes(part, tensors) for part in x])
    if isinstance(x, PLAIN):
        return type(x), x  # 1, 1.0 and True are equal, and give results of different types
    raise _NotShapesError


def _learn(func: Any, result: Any, tensors: list[FakeTensor]) -> Known:
    """How to make this result again; None where that is not known."""
    if func.namespace not in REMEMBERED or func._schema.is_mutable or UNKNOWABLE & set(func.tags):
        return None
    several = isinstance(result, (list, tuple))
    if not several and any(result is tensor for tensor in tensors):
        return [result is tensor for tensor in tensors].index(True)
    outputs = [_output(x, tensors) for x in (result if several else (result,))]
    known = tuple(output for output in outputs if output is not None)
    own = sum(output.viewed is None for output in known)
    storages = {x.untyped_storage()._cdata for x in (result if several else (result,)) if isinstance(x, Tensor)}
    if len(known) < len(outputs) or (own > 1 and len(storages) < len(known)):
        return None
    return known if several else known[0]


def _output(x: Any, tensors: list[FakeTensor]) -> Output | None:
    """How to make this one of an operation's results again; None where that is not known."""
    if not isinstance(x, FakeTensor) or x.constant is not None or x.layout != torch.strided:
        return None
    if any(x is tensor for tensor in tensors) or x.is_conj() or x.is_neg():
        return None
    storage = x.untyped_storage()
    viewed = [tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors]
    if any(viewed):
        return Output(x.shape, x.stride(), x.dtype, x.fake_device, viewed.index(True), int(x.storage_offset()))
    again = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if x.storage_offset() or again.untyped_storage().nbytes() != storage.nbytes():
        return None
    return Output(x.shape, x.stride(), x.dtype, x.fake_device, None, 0)


def _dealt_evenly(count: int, minlength: int) -> Tensor:
    """How often each number would come: a real tensor, as the host reads it (tokens of experts)."""
    share, over = divmod(count, minlength)
    return torch.tensor([share + (number < over) for number in range(minlength)])


def real() -> Any:
    """A context in which tensors are made as usual: meshes and plans, which are read on the host."""
    return _disable_current_modes()


class Storages:
    """Bytes of the storages that are alive, by the first kind each was seen as.

    Attributes:
        now, peak: bytes; at_peak: kind -> bytes when there were most.
        crest: most bytes since a caller set it.
    """

    def __init__(self) -> None:
        self.by_kind: dict[str, int] = {}
        self.held: dict[int, tuple[str, int]] = {}
        self.now = self.peak = self.crest = 0
        self.at_peak: dict[str, int] = {}

    def see(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor's storage until it is gone, unless it is counted already."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number not in self.held:
            self.held[number] = (kind, 0)
            weakref.finalize(storage, self._forget, number)
            self.resize(number, storage.nbytes())

    def resize(self, number: int, size_bytes: int) -> None:
        """A counted storage has another size."""
        kind, before = self.held[number]
        self.held[number] = (kind, size_bytes)
        self._add(kind, size_bytes - before)

    def name(self, tensor: Tensor, kind: str) -> None:
        """Count a storage that was seen before as another kind."""
        number = tensor.untyped_storage()._cdata
        if number in self.held:
            before, size_bytes = self.held[number]
            self._add(before, -size_bytes)
            self.held[number] = (kind, size_bytes)
            self._add(kind, size_bytes)

    def swell(self, size_bytes: int, kind: str) -> None:
        """So many bytes come and go."""
        self._add(kind, size_bytes)
        self._add(kind, -size_bytes)

    def start_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak, self.at_peak = self.now, dict(self.by_kind)

    def _forget(self, number: int) -> None:
        kind, size_bytes = self.held.pop(number)
        self._add(kind, -size_bytes)

    def _add(self, kind: str, size_bytes: int) -> None:
        self.by_kind[kind] = self.by_kind.get(kind, 0) + size_bytes
        self.now += size_bytes
        self.crest = max(self.crest, self.now)
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self.by_kind)


@dataclass(frozen=True)
class Message:
    """A collective of one kind, size and group, as this rank took part in it.

    Attributes:
        operation: torch's name.
        group: the ranks it is among, e.g. "4 ranks: 0, 2 ... 6".
        size_bytes: of the largest tensor it was given.
    """

    operation: str
    group: str
    size_bytes: int


class Ledger(TorchDispatchMode):
    """Sees every operation of a step: counts the storages that live, and writes down every message.

    The operator of attention is opened up: its strategies run as they do on a device, tile by tile. What one took is
    remembered, and counted again for each call of the same plan and sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages = Storages()
        self.messages: Counter[Message] = Counter()
        self.kind = "activations and buffers"
        self.took: dict[Any, tuple[int, Counter[Message]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # It comes back as operations on a rank's own part.
        if func is torch.ops.prim.device.default:
            x = args[0]  # torch's kernels, while they work out a shape, are told "meta"
            told_at_once = isinstance(x, FakeTensor) and not x.fake_mode.in_kernel_invocation
            return x.fake_device if told_at_once else func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._write_down(func, args)
        result = self._open(func, args, kwargs) if func in OPENED else func(*args, **kwargs)
        for x in (result,) if isinstance(result, Tensor) else tree_flatten(result)[0]:
            if isinstance(x, FakeTensor):
                self.storages.see(x, self.kind)
        return result

    def _open(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's own code the first time; then what it took, and the shapes of its results."""
        leaves = tree_flatten((args, kwargs))[0]
        key = (func, *(_as_key(leaf) for leaf in leaves))
        if key in self.took:
            extra_bytes, messages = self.took[key]
            self.storages.swell(extra_bytes, self.kind)
            self.messages += messages
            return func(*args, **kwargs)
        before, begun = Counter(self.messages), self.storages.now
        self.storages.crest = begun
        with self:
            result = OPENED[func](*args, **kwargs)
        self.took[key] = self.storages.crest - begun, self.messages - before
        return result

    def _write_down(self, func: Any, args: Any) -> None:
        tensors = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
        group = _group_in(args)
        if tensors and group is not None:
            operation = func._schema.name.partition("::")[2].strip("_")
            size = max(x.numel() * x.element_size() for x in tensors)
            self.messages[Message(operation, describe(group), size)] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count, here, also storages that FSDP empties and fills again, and not what DTensor asks for shapes with.

        The first time an operation is called, DTensor tries it on a whole tensor without data.
        """
        plain, try_out = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resize(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            result = plain(storage, size_bytes)
            if storage._cdata in self.storages.held:
                self.storages.resize(storage._cdata, size_bytes)
            return result

        def try_out_unseen(*arguments: Any) -> Any:
            with real():
                return try_out(*arguments)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = try_out_unseen  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = try_out  # type: ignore[method-assign]


def _as_key(leaf: Any) -> Any:
    """What of an operation's argument its memory and messages depend on."""
    if isinstance(leaf, FakeTensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return tuple(leaf.flatten().tolist()) if isinstance(leaf, Tensor) else leaf


def describe(group: dist.ProcessGroup) -> str:
    """A group by its size and its first, second and last rank."""
    ranks = dist.get_process_group_ranks(group)
    named = f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}" if len(ranks) > 2 else ", ".join(map(str, ranks))
    return f"{len(ranks)} ranks: {named}"


def _group_in(args: Any) -> dist.ProcessGroup | None:
    """The process group among an operation's arguments: an object, or a name in functional ones."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError, TypeError):
                return dist.ProcessGroup.unbox(argument)
    names: list[Any] = [argument for argument in args if isinstance(argument, str)]
    return _resolve_process_group(names[-1]) if names else None
