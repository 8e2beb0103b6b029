"""A job of any size in one process: a process group that sends nothing, and tensors without data.

It uses internals of torch, as torch's own tests and tools do.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.attention import flex_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from torchtitan_cp.attention.autograd import Context
from torchtitan_cp.attention.linear.convolution import convolve, convolve_backward
from torchtitan_cp.attention.linear.operator import delta_rule, delta_rule_backward
from torchtitan_cp.attention.local_shard import local_tensor
from torchtitan_cp.attention.operator import attention, attention_backward
from torchtitan_cp.parallel.nf4 import product

# The implementations of our operators, which fake tensors would not run.
OPERATORS: dict[object, Callable[..., object]] = {
    operator._opoverload: operator._init_fn
    for operator in (
        *(attention, attention_backward, delta_rule, delta_rule_backward),
        *(convolve, convolve_backward, product),
    )
}
WORKING = "activations and buffers"


@contextmanager
def fake_job(ranks: int, rank: int) -> Iterator[None]:
    """Be `rank` of a job of `ranks`, whose collectives return at once and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        # The backward of a GPU would run in another thread, for which DTensor has another cache.
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        dist.destroy_process_group()
        # DTensor's cache holds the meshes, and so the groups, of this job.
        _clear_sharding_prop_cache()


@contextmanager
def replaced(owner: type | ModuleType, name: str, value: object) -> Iterator[None]:
    """Give an attribute of a class or module of torch another value for a while.

    torch has no mode or hook for what is replaced here: storages that change their size, the shapes that DTensor
    learns by running operators, and the operator of flex_attention.
    """
    inherited, original = name not in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


class FakeMode(FakeTensorMode):
    """New tensors have a shape and no data. Operations on real tensors only, such as meshes, run as usual."""

    makes_real = False  # see `real_tensors`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor not in types and self.is_real(args, kwargs):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            # Values that the host reads: flags are False; counts are 1, because optimizers divide by their step.
            return False if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.index_add.default and args[0].dtype == torch.int64:
            return _even_counts(args[2].numel(), args[0].numel())
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def is_real(self, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """Whether an operation without fake tensors gives a real one: it has real tensors, or `real_tensors` is on."""
        return self.makes_real or any(isinstance(x, Tensor) for x in tree_flatten((args, kwargs))[0])

    @contextmanager
    def real_tensors(self) -> Iterator[None]:
        """A context in which new tensors have data, because the host reads meshes and plans."""
        before, self.makes_real = self.makes_real, True
        try:
            yield
        finally:
            self.makes_real = before


def _even_counts(count: int, size: int) -> Tensor:
    """How many of `count` evenly spread items, e.g. tokens, go to each expert; a real tensor, as the host reads it."""
    share, remainder = divmod(count, size)
    return torch.tensor([share + (number < remainder) for number in range(size)])


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The result of `_grouped_mm`, whose fake form takes only bf16, while the CPU takes other dtypes too."""
    groups = a.shape[:-2] if a.ndim == b.ndim else ()  # else offs splits the rows or the columns of the result
    if offs is not None and a.ndim == b.ndim == 2:  # offs splits the dim that is summed
        groups = offs.shape
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype)


class Message(NamedTuple):
    """A collective of one kind, size and group that this rank takes part in.

    Attributes:
        operation: name in torch.
        group: its size, and its first, second and last rank, e.g. "4 ranks: 0, 2 ... 6".
        size_bytes: of its largest tensor argument.
    """

    operation: str
    group: str
    size_bytes: int


class _FlexResults(torch.autograd.Function):
    """Stands for flex_attention's compiled kernel, whose operator has a fake form only inside the compiler."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        return q.new_empty(*q.shape[:-1], v.shape[-1]), lse, lse.new_empty(0)

    @staticmethod
    def backward(ctx: Context, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (*map(torch.empty_like, ctx.saved_tensors), None, None, None, None)


@contextmanager
def fake_flex() -> Iterator[None]:
    """A context in which flex_attention checks its arguments and returns tensors without data."""
    with (
        replaced(flex_attention, "flex_attention_hop", _FlexResults.apply),
        replaced(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ):
        yield


class StepTracker(TorchDispatchMode):
    """Sees every operation of a step: adds up live storages by kind, and counts messages.

    The attention operator runs its own code, tile by tile as on a device. Its memory and messages are cached, and
    counted again for each call with the same plan and sizes.

    Args:
        device: type of the device whose memory is counted.

    Attributes:
        held: kind and bytes of each live storage.
        now, peak: current and most bytes; by_kind, at_peak: the same by kind, at_peak without zeros.
        local_peak: most bytes since it was last set.
        operator_costs: bytes of each call of the attention operator, without its results, and its messages.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.held: dict[int, tuple[str, int]] = {}
        self.by_kind: Counter[str] = Counter()
        self.now = self.local_peak = 0
        self.in_operator = False
        self.messages: Counter[Message] = Counter()
        self.operator_costs: dict[Hashable, tuple[int, Counter[Message]]] = {}
        self.start_peak()

    def start_peak(self) -> None:
        """Measure the peak, and count messages, from now on."""
        self.peak, self.at_peak = self.now, dict(+self.by_kind)
        self.messages.clear()

    def set_kind(self, x: Tensor, kind: str) -> None:
        """Count a tensor under another kind."""
        self.update_storage(local_tensor(x).untyped_storage(), kind)

    def update_storage(self, storage: torch.UntypedStorage, kind: str = "") -> None:
        """Count a tracked storage with its current size, and under another kind if one is given."""
        if held := self.held.get(storage._cdata):
            self._forget(storage._cdata)
            self._hold(storage, kind or held[0])

    def _track(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed, once."""
        if storage._cdata not in self.held:
            self._hold(storage, WORKING)
            weakref.finalize(storage, self._forget, storage._cdata)

    def _hold(self, storage: torch.UntypedStorage, kind: str) -> None:
        self.held[storage._cdata] = kind, storage.nbytes()
        self._add(*self.held[storage._cdata])

    def _forget(self, number: int) -> None:
        kind, size_bytes = self.held.pop(number)
        self._add(kind, -size_bytes)

    def _add(self, kind: str, size_bytes: int) -> None:
        self.by_kind[kind] += size_bytes
        self.now += size_bytes
        self.local_peak = max(self.local_peak, self.now)
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(+self.by_kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # DTensor calls this again with local tensors.
        if func is torch.ops.prim.device.default:
            x = args[0]  # its device is "meta" inside a kernel that computes a shape
            outside_kernel = isinstance(x, FakeTensor) and not x.fake_mode.in_kernel_invocation
            return x.fake_device if outside_kernel else func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_message(func, args)
        if func is torch.ops.c10d._reduce_scatter_base_.default and not self.in_operator:
            self.set_kind(args[0], "gradients")  # also those that replicas have yet to sum
        result = self._run_operator(func, args, kwargs) if func in OPERATORS else func(*args, **kwargs)
        for x in (result,) if isinstance(result, Tensor) else tree_flatten(result)[0]:
            # A model has a copy on the meta device, which has no memory; offloaded tensors are on the host.
            if isinstance(x, FakeTensor) and x.fake_device.type == self.device:
                self._track(x.untyped_storage())
        return result

    def _run_operator(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Run the operator's own code the first time; later, count the memory and messages that it needed then."""
        key = (func, *map(_as_key, tree_flatten((args, kwargs))[0]))
        if key in self.operator_costs:
            extra_bytes, messages = self.operator_costs[key]
            self._add(WORKING, extra_bytes)
            self._add(WORKING, -extra_bytes)
            self.messages += messages
            return func(*args, **kwargs)
        messages_before, bytes_before = Counter(self.messages), self.now
        self.local_peak, self.in_operator = bytes_before, True
        with self:
            result = OPERATORS[func](*args, **kwargs)
        self.in_operator = False
        self.operator_costs[key] = self.local_peak - bytes_before, self.messages - messages_before
        return result

    def _count_message(self, func: Callable[..., object], args: Sequence[object]) -> None:
        tensors = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
        group = _group_in(args)
        if tensors and group is not None:
            operation = func._schema.name.partition("::")[2].strip("_")  # type: ignore[attr-defined]
            ranks = dist.get_process_group_ranks(group)
            numbers = f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}" if len(ranks) > 2 else ", ".join(map(str, ranks))
            size = max(x.nbytes for x in tensors)
            self.messages[Message(operation, f"{len(ranks)} ranks: {numbers}", size)] += 1

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track operations in this context, and the storages that FSDP resizes.

        DTensor runs each new operation once on unsharded fake tensors to learn shapes; those are not tracked.
        """
        resize_plain = torch.UntypedStorage.resize_
        untracked = _disable_current_modes()(ShardingPropagator._propagate_tensor_meta_non_cached)

        def resize(storage: torch.UntypedStorage, size_bytes: int) -> object:
            result = resize_plain(storage, size_bytes)
            self.update_storage(storage)
            return result

        with (
            replaced(torch.UntypedStorage, "resize_", resize),
            replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", untracked),
            self,
        ):
            yield


def _as_key(leaf: Hashable) -> Hashable:
    """The properties of an argument that the operator's memory and messages depend on."""
    if isinstance(leaf, FakeTensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return tuple(leaf.flatten().tolist()) if isinstance(leaf, Tensor) else leaf


def _group_in(args: Sequence[object]) -> dist.ProcessGroup | None:
    """The process group among an operation's arguments: an object, or in functional operations a name."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError, TypeError):
                return dist.ProcessGroup.unbox(argument)
    names: list[Any] = [argument for argument in args if isinstance(argument, str)]
    return _resolve_process_group(names[-1]) if names else None
