"""The public face: ContextParallel, and the functions behind it for those who hold only a plan."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.kernels import KERNELS, Kernel, choose_kernel
from torchtitan_cp.attention.layout import make_layout
from torchtitan_cp.attention.mask import UNBOUNDED, AttentionMask
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.strategies import STRATEGIES


class ContextParallel:
    """Attention over a sequence that is split across the ranks of a mesh.

    Args:
        mesh: 1-D DeviceMesh of the P ranks that share a sequence.
        strategy: exchange by name: ring, or auto.
        kernel: local kernel by name: cpu, flash, reference, or auto (by device and dtype).
        layout: contiguous, zigzag, or auto (zigzag).

    Raises:
        PlanError: a name that is not known, or a mesh of more than one axis.
    """

    def __init__(self, mesh: DeviceMesh, strategy: str = "auto", kernel: str = "auto", layout: str = "auto") -> None:
        if mesh.ndim != 1:
            raise PlanError(f"the mesh has {mesh.ndim} axes", fix="give the 1-D mesh of the context-parallel ranks")
        self.mesh = mesh
        self.strategy, self.kernel, self.layout = choose_strategy(strategy), check_kernel(kernel), layout
        self.group_name: str = mesh.get_group().group_name

    def plan(self, seq_len: int, mask: AttentionMask | None = None) -> Plan:
        """This rank's plan for sequences of `seq_len` tokens; see `make_plan`."""
        return make_plan(
            seq_len,
            mask=mask,
            ranks=self.mesh.size(),
            rank=self.mesh.get_local_rank(),
            strategy=self.strategy,
            kernel=self.kernel,
            layout=self.layout,
            group_name=self.group_name,
        )

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of the local queries over the full sequence; see `attend`."""
        if sinks is not None:
            raise PlanError("attention sinks are not available in this version", fix="pass sinks=None")
        return attend(q, k, v, plan, scale)


def make_plan(
    seq_len: int,
    *,
    mask: AttentionMask | None = None,
    ranks: int = 1,
    rank: int = 0,
    strategy: str = "auto",
    kernel: str = "auto",
    layout: str = "auto",
    group_name: str | None = None,
) -> Plan:
    """Work out one rank's plan from integers alone: in a loader's worker, a test, a simulation.

    Args:
        seq_len: S, in tokens.
        mask: default causal, one document.
        ranks: P, size of the context-parallel group; `rank` is the place in it.
        strategy, kernel, layout: by name, as for ContextParallel.
        group_name: name of the process group that will carry the exchange; None to look at the plan only.

    Raises:
        LayoutError: S cannot be cut this way.
        PlanError: the mask has what this version cannot do, or its documents do not fill the sequence.
    """
    mask = mask or AttentionMask()
    if mask.window != UNBOUNDED:
        raise PlanError(f"window = {mask.window} is not available in this version", fix="use window = (-1, -1)")
    mask.documents(seq_len)
    chosen = make_layout(layout, seq_len, ranks)
    return Plan(seq_len, mask, chosen, rank, choose_strategy(strategy), check_kernel(kernel), group_name)


def choose_strategy(name: str) -> str:
    """`auto` made a name; a name that is not known is refused."""
    if name != "auto" and name not in STRATEGIES:
        raise PlanError(f"strategy {name!r} is not available", fix=f"use one of auto, {', '.join(STRATEGIES)}")
    return "ring" if name == "auto" else name


def check_kernel(name: str) -> str:
    """A name of the kernels' registry, or `auto`; which one it is shows with the first tensors."""
    if name != "auto" and name not in KERNELS:
        raise PlanError(f"attention kernel {name!r} is not available", fix=f"use one of auto, {', '.join(KERNELS)}")
    return name


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None = None) -> Tensor:
    """Attention of a rank's queries over the full sequence, differentiable. Collective over the plan's group.

    Args:
        q: `[B, S/P, Hq, D]`.
        k: `[B, S/P, Hkv, D]`; Hq is a multiple of Hkv.
        v: `[B, S/P, Hkv, Dv]`.
        plan: this rank's plan; the ranks of a group call with the same sequence length and mask.
        scale: of the scores; default D ** -0.5.

    Returns:
        `[B, S/P, Hq, Dv]` in q's dtype.

    Raises:
        PlanError: shapes or dtypes that do not fit the plan or each other, or a kernel that cannot run them.
    """
    check_shapes(q, k, v, plan)
    kernel = choose_kernel(plan.kernel, q, v)
    return _Attention.apply(q, k, v, plan, kernel, q.shape[-1] ** -0.5 if scale is None else scale)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
    """Raise PlanError unless q, k, v fit the plan and each other."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise PlanError(f"attention takes [batch, sequence, heads, dim], got {shapes}")
    if not q.shape[1] == k.shape[1] == v.shape[1] == plan.local_tokens:
        raise PlanError(f"the plan holds {plan.local_tokens} tokens a rank, got {shapes}", fix="shard with plan.shard")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise PlanError(f"batch, heads or dims do not match: {shapes}", fix="Hq must be a multiple of Hkv")
    if not q.dtype == k.dtype == v.dtype:
        raise PlanError(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}", fix="cast them to one")
    rows = plan.mask.document_lengths
    if rows is not None and len(rows) not in (1, q.shape[0]):
        raise PlanError(f"the mask has documents of {len(rows)} batch rows and q has {q.shape[0]}")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, kernel: Kernel, scale: float) -> Tensor:
        out, lse = STRATEGIES[plan.strategy].forward(q, k, v, plan, kernel, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.kernel, ctx.scale = plan, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        strategy = STRATEGIES[ctx.plan.strategy]
        dq, dk, dv = strategy.backward(gradients[0], q, k, v, out, lse, ctx.plan, ctx.kernel, ctx.scale)
        return dq, dk, dv, None, None, None
