"""A short causal convolution of each channel, over documents that lie on several ranks.

The first positions of a run want the W - 1 before them, wherever these are: on up to W - 1 other ranks. They travel
there, and backward their gradients travel home.
"""

from collections import deque
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.collectives import find_group
from torchtitan_cp.attention.compiling import above_autograd
from torchtitan_cp.attention.errors import PlanError, check_name
from torchtitan_cp.attention.linear.operator import check_mask
from torchtitan_cp.attention.linear.states import KEPT, document_offsets, stretches
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.operator import operator
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.plan_registry import find_plan


def causal_conv(
    x: Tensor, weight: Tensor, plan: Plan, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """A causal depthwise convolution of each document, differentiable. Collective over the plan's group.

    Token t of a document becomes the sum over w < W of weight[:, W - 1 - w] x[t - w], as far as the document reaches.

    Args:
        x: `[B, S/P, C]`.
        weight: `[C, W]`, the last column for the token itself, as of torch.nn.Conv1d without its middle dim. Its
            gradient, like the bias's, is that of this rank's outputs: sum it over the ranks.
        plan: this rank's, of any layout and packing; its mask is causal and has no window.
        bias: `[C]`.
        activation: "silu", or None.

    Returns:
        `[B, S/P, C]` in x's dtype; rows of padding are zero. Sums are fp32 (fp64 for fp64).

    Raises:
        PlanError: shapes do not fit the plan or each other; a window, a mask that is not causal, or a mesh of two axes;
            an unknown activation.
    """
    if activation is not None:
        check_name("activation", activation, ("silu",))
    check_mask(plan, len(x))
    inputs, sizes = [x, weight] if bias is None else [x, weight, bias], [3, 2, 1]
    fits = [y.ndim for y in inputs] == sizes[: len(inputs)] and {x.shape[-1]} == {len(y) for y in inputs[1:]}
    if not fits or x.shape[1] != plan.local_tokens:
        shapes = ", ".join(str(tuple(y.shape)) for y in inputs)
        raise PlanError(
            f"causal_conv takes x [B, S/P, C], weight [C, W] and bias [C], S/P = {plan.local_tokens}, got {shapes}",
            fix="shard x with plan.shard",
        )
    return convolve(inputs, plan.handle, activation is not None)


@lru_cache(maxsize=KEPT)
def _moved_rows(plan: Plan, width: int, device: torch.device) -> tuple[list[Tensor], ...]:
    """What fills the W - 1 rows before each run, as far as its tokens read them; a rank's halos lie one after another.

    Returns:
        per rank, (the local rows that it gets, the rows of halos here that it fills).
    """
    moves: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, row of its halos) <- (rank, local row)
    for document in stretches(plan):
        before: deque[tuple[int, int]] = deque(maxlen=width - 1)
        for one in document:
            halo_end = (one.run + 1) * (width - 1)
            moves |= {(one.rank, halo_end - distance): row for distance, row in enumerate(reversed(before), 1)}
            first = one.local + max(0, one.tokens - width)
            before.extend((one.rank, row) for row in range(first, one.local + one.tokens))
    given, placed = ([list[int]() for _ in range(plan.ranks)] for _ in range(2))
    for (target, halo_row), (source, row) in moves.items():
        if source == plan.rank:
            given[target].append(row)
        if target == plan.rank:
            placed[source].append(halo_row)
    return tuple([torch.tensor(rows, dtype=torch.int64).to(device) for rows in side] for side in (given, placed))


def _carry(x: Tensor, width: int, onto: Tensor, plan: Plan, back: bool = False) -> None:
    """Add local rows `[B, s, C]` to the halos that read them, `[B, runs (W - 1), C]`; or the way back."""
    given, placed = _moved_rows(plan, width, x.device)[:: -1 if back else 1]
    parts = [x.index_select(1, rows).flatten() for rows in given]
    sizes = [len(rows) * len(x) * x.shape[-1] for rows in placed]
    received = find_group(plan.groups, plan.ranks).exchange(parts, sizes)
    for flat, rows in zip(received, placed, strict=True):
        values = flat.view(len(x), len(rows), x.shape[-1])
        # Several halos may hold a row; this adds them in one order, unlike index_add_ on CUDA.
        onto.transpose(0, 1).index_put_((rows,), values.transpose(0, 1), accumulate=True)


def _halos(x: Tensor, plan: Plan, width: int) -> Tensor:
    """What precedes each run, zeros where nothing is read, `[B, runs (W - 1), C]`."""
    halos = x.new_zeros(len(x), len(plan.layout.spans[plan.rank]) * (width - 1), x.shape[-1])
    _carry(x, width, halos, plan)
    return halos


def _convolve(plan: Plan, silu: bool, x: Tensor, halos: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The convolution of a rank's rows; differentiable."""
    width, dtype = weight.shape[1], accumulation_dtype(x.dtype)
    runs = [stop - start for start, stop in plan.layout.spans[plan.rank]]

    def with_halos(x: Tensor, halos: Tensor) -> Tensor:
        pairs = zip(halos.split([width - 1] * len(runs), 1), x.split(runs, 1), strict=True)
        return torch.cat([piece for pair in pairs for piece in pair], 1)

    # Widened once, so that the gradients of all reads add up in fp32.
    rows, offsets = with_halos(x.to(dtype), halos.to(dtype)), document_offsets(plan, x.device)
    nowhere = offsets.new_full((len(offsets), halos.shape[1]), -1)
    offsets = with_halos(offsets, nowhere)[:, width - 1 :, None]
    total = x.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    for distance in range(width):
        # What lies further back than the document's first token is another's.
        read = rows[:, width - 1 - distance : rows.shape[1] - distance].where(offsets >= distance, 0.0)
        total = total + read * weight[:, width - 1 - distance].to(dtype)
    total = (F.silu(total) if silu else total).where(offsets >= 0, 0.0).to(x.dtype)
    pieces = total.split([length for run in runs for length in (run, width - 1)][:-1], 1)
    return torch.cat(pieces[::2], 1)


@operator("causal_conv")
def convolve(inputs: list[Tensor], handle: Tensor, silu: bool) -> Tensor:
    """`[B, S/P, C]` of x, weight and perhaps bias."""
    plan, (x, *parameters) = find_plan(handle), inputs
    return _convolve(plan, silu, x, _halos(x, plan, parameters[0].shape[1]), *parameters)


@operator("causal_conv_backward")
def convolve_backward(dout: Tensor, inputs: list[Tensor], handle: Tensor, silu: bool) -> list[Tensor]:
    """The gradients of the inputs."""
    plan, (x, *parameters) = find_plan(handle), inputs
    width = parameters[0].shape[1]
    with above_autograd(), torch.enable_grad():
        leaves = [y.detach().requires_grad_() for y in (x, _halos(x, plan, width), *parameters)]
        out = _convolve(plan, silu, *leaves)
        dx, dhalos, *dparameters = torch.autograd.grad(out, leaves, dout)
    dx = dx.clone(memory_format=torch.contiguous_format)
    _carry(dhalos, width, dx, plan, back=True)
    return [dx, *dparameters]


def _save_for_backward(ctx: Any, inputs: tuple[list[Tensor], Tensor, bool], output: Tensor) -> None:
    tensors, handle, ctx.silu = inputs
    ctx.save_for_backward(handle, *tensors)


def _backward(ctx: Any, dout: Tensor) -> tuple[list[Tensor], None, None]:
    handle, *tensors = ctx.saved_tensors
    return torch.ops.torchtitan_cp.causal_conv_backward(dout, tensors, handle, ctx.silu), None, None


convolve.register_fake(lambda inputs, *_: inputs[0].new_empty(inputs[0].shape))
convolve_backward.register_fake(lambda dout, inputs, *_: [x.new_empty(x.shape) for x in inputs])
convolve.register_autograd(_backward, setup_context=_save_for_backward)

CONVOLUTION = torch.ops.torchtitan_cp.causal_conv.default
