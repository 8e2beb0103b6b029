"""Records what a model does in one step: inputs and outputs of its modules, and the attention calls that reach us."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_cp.attention.comparison import Quantity, Trace
from torchtitan_cp.attention.linear.convolution import CONVOLUTION
from torchtitan_cp.attention.linear.operator import DELTA_RULE
from torchtitan_cp.attention.operator import OPERATOR, with_exchange
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.plan_registry import find_plan

SKETCH = 8  # features are recorded as this many random combinations


class CallInfo(NamedTuple):
    """An attention call that reached us: (Hq, Hkv), (Dqk, Dv) and its options. Its q, k and v are events.

    A recurrence is recorded as a recurrent call, with (Hv, Hk), (K, V).
    """

    heads: tuple[int, int]
    dims: tuple[int, int]
    plan: Plan
    scale: float
    softcap: float
    sinks: Tensor | None
    recurrent: bool = False


@dataclass
class ModuleTrace(Trace):
    """What one step did.

    Attributes:
        events: inputs and outputs of modules ("in", "out") as sketches `[B, S/P, 8]`, and "q", "k" and "v" of their
            attention, `[B, S/P, H, D]`.
        calls: the first attention call of each module that reached us.
        attending: modules that computed a softmax or another attention; convolving: that called our convolution.
        first: the first module, and how many tokens of a sequence its output has.
    """

    calls: dict[str, CallInfo] = field(default_factory=dict)
    attending: set[str] = field(default_factory=set)
    convolving: set[str] = field(default_factory=set)
    first: tuple[str, float] | None = None


class _Recorder(TorchDispatchMode):
    """Fills a trace while it is active; see `record_modules`."""

    def __init__(self, model: nn.Module, trace: ModuleTrace, sequences: int, tokens: int, own_values: bool) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.trace, self.sequences, self.tokens, self.own_values = trace, sequences, tokens, own_values
        self.running = [""]  # the modules that are running, by name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = self.running[-1]
        if func is OPERATOR:
            q, k, v, sinks, handle, scale, softcap, all_to_all_ranks = args
            heads, dims = zip(q.shape[2:], v.shape[2:], strict=True)
            sinks = None if sinks is None else sinks.detach().cpu().clone()  # FSDP frees a weight after its layer
            plan = with_exchange(find_plan(handle), all_to_all_ranks)
            self.trace.calls.setdefault(layer, CallInfo(heads, dims, plan, scale, softcap, sinks))
            for name, x in zip("qkv", (q, k, v), strict=True):
                self.note(layer, name, x)
            if self.own_values:
                return v.repeat_interleave(q.shape[2] // v.shape[2], 2), q.new_zeros(q.shape[:3]), []
        elif func is DELTA_RULE:
            (q, _, v, *_), handle, scale, *_ = args
            heads, dims = (v.shape[2], q.shape[2]), (q.shape[3], v.shape[3])
            self.trace.calls.setdefault(
                layer, CallInfo(heads, dims, find_plan(handle), scale, 0.0, None, recurrent=True)
            )
            if self.own_values:
                return v.clone(), []
        elif func is CONVOLUTION:
            self.trace.convolving.add(layer)
            if self.own_values:
                return args[0][0].clone()  # of x and its parameters
        elif "softmax" in str(func) or "attention" in str(func):
            self.trace.attending.add(layer)
        return func(*args, **(kwargs or {}))

    def enter(self, module: nn.Module, args: object) -> None:
        if module in self.names:
            self.running.append(self.names[module])

    def leave(self, module: nn.Module, args: tuple[object, ...], named: dict[str, object], out: object) -> None:
        if module in self.names:
            name = self.running.pop()
            if name in self.running:  # a head that calls the output layer
                return
            # transformers calls a rotary embedding once for each kind of layer, in the order of a set: not the same
            # on each rank.
            kind = "".join(f" {x}" for x in (*args, *named.values()) if isinstance(x, str))
            if not any(module.children()):
                self.note(name, f"in{kind}", args)
            self.note(name, f"out{kind}", out)

    @torch.no_grad()
    def note(self, name: str, side: str, value: object) -> None:
        tensors = (x.detach() for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point())
        x = next((x for x in tensors if x.ndim > 1), None)
        if x is None or (name, side) in self.trace.events:
            return
        if self.trace.first is None:
            self.trace.first = (name, x.shape[1] if x.ndim > 2 else len(x) / self.sequences)
        if len(x) == self.sequences * self.tokens:
            x = x.unflatten(0, (self.sequences, self.tokens))
        dim = next((dim for dim in (1, 2) if x.ndim > dim and x.shape[dim] == self.tokens), None)
        if dim and (x.ndim > 2 or len(x) == self.sequences):  # rows of experts may be as wide as a sequence is long
            x = x.movedim(dim, 1)
            self.trace.events[name, side] = (x if side in "qkv" else sketch(x.reshape(*x.shape[:2], -1))).cpu()


def sketch(rows: Tensor) -> Tensor:
    """`[.., F] -> [.., 8]`: random combinations of the features, the same on every rank. Differences stay visible."""
    generator = torch.Generator().manual_seed(rows.shape[-1])
    return rows.float() @ torch.randn(rows.shape[-1], SKETCH, generator=generator).to(rows.device)


@contextmanager
def record_modules(
    parts: Sequence[nn.Module], *, sequences: int, tokens: int, own_values: bool = False
) -> Iterator[ModuleTrace]:
    """Record a module's next step; an exception of it ends the step and is noted in the trace.

    Args:
        parts: the module, alone.
        sequences: B.
        tokens: of each sequence on this rank.
        own_values: every attention that reaches us returns its v; only without gradients.
    """
    (model,), trace = parts, ModuleTrace()
    recorder = _Recorder(model, trace, sequences, tokens, own_values)
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(recorder.enter).remove)
        stack.callback(register_module_forward_hook(recorder.leave, with_kwargs=True).remove)
        stack.enter_context(recorder)
        try:
            yield trace
        except Exception as error:
            trace.error = f"{type(error).__name__}: {error}"


def gather_modules(trace: ModuleTrace, plan: Plan, ranks: list[int]) -> dict[Quantity, Tensor]:
    """The events of whole sequences, from those of the ranks that share them. Collective over all ranks of the job."""
    by_rank = [trace.events] * dist.get_world_size()
    dist.all_gather_object(by_rank, trace.events)
    shards = [by_rank[rank] for rank in ranks]
    # The plans of the model's calls say where tokens lie; with a wrong mask that may be another layout.
    plans = [call.plan for call in trace.calls.values() if call.plan.sequence_length == plan.sequence_length]
    order = torch.cat([[*plans, plan][0].layout.positions(rank) for rank in range(plan.ranks)]).argsort()
    common = [key for key in trace.events if all(key in shard for shard in shards)]
    return {key: torch.cat([shard[key] for shard in shards], 1)[:, order] for key in common}
