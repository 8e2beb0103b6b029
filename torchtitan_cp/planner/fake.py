"""A job of any size in one process: a process group that sends nothing, and tensors without data.

It uses internals of torch that torch's own tests and tools use too; no other file does.
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

# Code of the attention operator, which a fake tensor would otherwise skip.
OPERATORS: dict[Any, Callable[..., Any]] = {
    OPERATOR: attention._init_fn,
    torch.ops.torchtitan_cp.attention_backward.default: attention_backward._init_fn,
}

# Arguments that are part of a cache key as they are.
KEY_TYPES = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
# Namespaces whose operations return new tensors, views or their argument, and have no side effects.
CACHED_NAMESPACES = ("aten", "prims", "_c10d_functional")
# Tags of operations whose result depends on data, or that change their argument.
UNCACHED_TAGS = {
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
        # DTensor's cache holds the meshes, and so the groups, of this job.
        _clear_sharding_prop_cache()


class Output(NamedTuple):
    """A tensor that an operation returned: a new one, or a view of one of its arguments.

    Attributes:
        viewed: number of the argument that it is a view of; None: it has its own storage.
        offset: where in that storage it begins, in elements.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    viewed: int | None
    offset: int


# An operation's cached result or results; the number of the argument that it returns; None: it cannot be cached.
Cached = tuple[Output, ...] | Output | int | None


class CachingFakeMode(FakeTensorMode):
    """New tensors have a shape and no data. Operations on real tensors alone run as usual: meshes, labels, handles.

    Results are cached by the shapes of the arguments, as layers repeat. With torch's own cache of this kind a dry run
    takes 1.6 times as long.
    """

    def __init__(self) -> None:
        # A real tensor may be an argument beside fake ones.
        super().__init__(allow_non_fake_inputs=True)
        self.results: dict[Any, Cached] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # Values that the host reads: flags are off; counts are one, as optimizers divide by their step.
            return False if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.bincount.default and isinstance(args[0], FakeTensor):
            return _even_counts(args[0].numel(), *args[2:], **(kwargs or {}))
        # The first argument usually suffices; flattening all of them costs more than many operations.
        if not (args and isinstance(args[0], FakeTensor)):
            tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
            if tensors and not any(isinstance(x, FakeTensor) for x in tensors):
                return func(*args, **(kwargs or {}))
        return self._result(func, types, args, kwargs or {})

    def _result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """An operation's result, from the cache where the shapes alone decide it."""
        tensors: list[FakeTensor] = []
        try:
            key = (func, _key_of(args, tensors), _key_of(tuple(kwargs.items()), tensors))
            known = self.results[key]
        except _UncachedError:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except KeyError:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self.results[key] = _cached_result(func, result, tensors)
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


class _UncachedError(Exception):
    """A result depends on more than shapes and plain values."""


def _key_of(x: Any, tensors: list[FakeTensor]) -> Any:
    """A cache key of arguments; their tensors are appended to `tensors`, in order."""
    if isinstance(x, FakeTensor):
        if x.constant is not None:
            raise _UncachedError
        tensors.append(x)
        return x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device
    if isinstance(x, (list, tuple)):
        return tuple([_key_of(part, tensors) for part in x])
    if isinstance(x, KEY_TYPES):
        return type(x), x  # 1, 1.0 and True are equal, with results of different types
    raise _UncachedError


def _cached_result(func: Any, result: Any, tensors: list[FakeTensor]) -> Cached:
    """How to make this result again; None where it cannot be cached."""
    if func.namespace not in CACHED_NAMESPACES or func._schema.is_mutable or UNCACHED_TAGS & set(func.tags):
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
    """How to make this tensor of a result again; None where it cannot be cached."""
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


def _even_counts(count: int, minlength: int) -> Tensor:
    """Counts of evenly spread numbers, e.g. tokens of experts; a real tensor, as the host reads it."""
    share, over = divmod(count, minlength)
    return torch.tensor([share + (number < over) for number in range(minlength)])


def real_tensors() -> Any:
    """A context in which tensors have data: meshes and plans, which the host reads."""
    return _disable_current_modes()


class Storages:
    """Bytes of live storages by kind.

    Attributes:
        now, peak: bytes; at_peak: kind -> bytes at the peak.
        local_peak: most bytes since a caller set it.
    """

    def __init__(self) -> None:
        self.by_kind: dict[str, int] = {}
        self.held: dict[int, tuple[str, int]] = {}
        self.now = self.peak = self.local_peak = 0
        self.at_peak: dict[str, int] = {}

    def track(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor's storage until it is freed, once."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.held:
            weakref.finalize(storage, self._forget, storage._cdata)
            self._set(storage._cdata, kind, storage.nbytes())

    def resize(self, number: int, size_bytes: int) -> None:
        """Take the new size of a tracked storage."""
        self._set(number, self.held[number][0], size_bytes)

    def set_kind(self, tensor: Tensor, kind: str) -> None:
        """Count a tracked storage as another kind."""
        number = tensor.untyped_storage()._cdata
        if number in self.held:
            self._set(number, kind, self.held[number][1])

    def _set(self, number: int, kind: str, size_bytes: int) -> None:
        self._add(*self.held.get(number, (kind, 0)), sign=-1)
        self.held[number] = (kind, size_bytes)
        self._add(kind, size_bytes)

    def add_transient(self, size_bytes: int, kind: str) -> None:
        """Count bytes that are allocated and freed again."""
        self._add(kind, size_bytes)
        self._add(kind, size_bytes, sign=-1)

    def start_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak, self.at_peak = self.now, dict(self.by_kind)

    def _forget(self, number: int) -> None:
        self._add(*self.held.pop(number), sign=-1)

    def _add(self, kind: str, size_bytes: int, sign: int = 1) -> None:
        size_bytes *= sign
        self.by_kind[kind] = self.by_kind.get(kind, 0) + size_bytes
        self.now += size_bytes
        self.local_peak = max(self.local_peak, self.now)
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self.by_kind)


@dataclass(frozen=True)
class Message:
    """A collective of one kind, size and group that this rank takes part in.

    Attributes:
        operation: torch's name.
        group: its ranks, e.g. "4 ranks: 0, 2 ... 6".
        size_bytes: of its largest tensor argument.
    """

    operation: str
    group: str
    size_bytes: int


class StepTracker(TorchDispatchMode):
    """Sees every operation of a step: tracks live storages and counts messages.

    The attention operator runs its own code, tile by tile as on a device. Its memory and messages are cached, and
    counted again for each call with the same plan and sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages = Storages()
        self.messages: Counter[Message] = Counter()
        self.kind = "activations and buffers"
        self.operator_costs: dict[Any, tuple[int, Counter[Message]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # DTensor calls this again with local tensors.
        if func is torch.ops.prim.device.default:
            x = args[0]  # inside a kernel that works out a shape it is "meta"
            outside_kernel = isinstance(x, FakeTensor) and not x.fake_mode.in_kernel_invocation
            return x.fake_device if outside_kernel else func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_message(func, args)
        result = self._run_operator(func, args, kwargs) if func in OPERATORS else func(*args, **kwargs)
        for x in (result,) if isinstance(result, Tensor) else tree_flatten(result)[0]:
            if isinstance(x, FakeTensor):
                self.storages.track(x, self.kind)
        return result

    def _run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator's own code the first time; after that, count what it took."""
        leaves = tree_flatten((args, kwargs))[0]
        key = (func, *(_as_key(leaf) for leaf in leaves))
        if key in self.operator_costs:
            extra_bytes, messages = self.operator_costs[key]
            self.storages.add_transient(extra_bytes, self.kind)
            self.messages += messages
            return func(*args, **kwargs)
        before, begun = Counter(self.messages), self.storages.now
        self.storages.local_peak = begun
        with self:
            result = OPERATORS[func](*args, **kwargs)
        self.operator_costs[key] = self.storages.local_peak - begun, self.messages - before
        return result

    def _count_message(self, func: Any, args: Any) -> None:
        tensors = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
        group = _group_in(args)
        if tensors and group is not None:
            operation = func._schema.name.partition("::")[2].strip("_")
            size = max(x.numel() * x.element_size() for x in tensors)
            self.messages[Message(operation, describe(group), size)] += 1

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track operations in this context, and the storages that FSDP resizes.

        DTensor runs each new operation once on unsharded fake tensors to learn shapes; those are not tracked.
        """
        resize_plain, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resize(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            result = resize_plain(storage, size_bytes)
            if storage._cdata in self.storages.held:
                self.storages.resize(storage._cdata, size_bytes)
            return result

        def propagate_untracked(*arguments: Any) -> Any:
            with real_tensors():
                return propagate(*arguments)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate_untracked  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize_plain  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]


def _as_key(leaf: Any) -> Any:
    """The part of an argument that the operator's memory and messages depend on."""
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
