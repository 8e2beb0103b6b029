"""A short causal convolution of each channel, over documents that lie on several ranks.

The first positions of a run want the W - 1 before them, wherever these are: on up to W - 1 other ranks. They are the
keys of a window of W: they travel as such, and backward their gradients travel home.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.caching import keep_newest, to_device
from torchtitan_cp.attention.collectives import find_group
from torchtitan_cp.attention.compiling import with_autograd
from torchtitan_cp.attention.errors import check_name
from torchtitan_cp.attention.layout import cut_by_document, documents_of
from torchtitan_cp.attention.linear.operator import check_inputs
from torchtitan_cp.attention.linear.states import ROWS, document_offsets
from torchtitan_cp.attention.mask import Span, count_rows, merge_spans
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.operator import operator
from torchtitan_cp.attention.plan import Plan, ring_steps
from torchtitan_cp.attention.plan_registry import find_plan
from torchtitan_cp.attention.strategies.ring import add_rows, rows_in

Spans = tuple[Span, ...]


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
        bias: `[C]`; it and weight may have another floating dtype than x.
        activation: "silu", or None.

    Returns:
        `[B, S/P, C]` in x's dtype; rows of padding are zero. Sums are fp32 (fp64 for fp64).

    Raises:
        PlanError: shapes do not fit the plan or each other; a window, a mask that is not causal, or a mesh of two axes
            without `whole_mesh`; an unknown activation.
    """
    if activation is not None:
        check_name("activation", activation, ("silu",))
    inputs = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    fits = [y.ndim for y in inputs.values()] == [3, 2, 1][: len(inputs)] and x.shape[1] == plan.local_tokens
    fits = fits and {len(y) for y in (weight, bias) if y is not None} == {x.shape[2]}
    check_inputs(plan, fits, "causal_conv takes x [B, S/P, C], weight [C, W] and bias [C]", inputs)
    return convolve(list(inputs.values()), plan.handle, activation is not None)


@keep_newest
def _find_reads(plan: Plan, width: int) -> tuple[list[Spans], list[int], Spans, Spans]:
    """What travels, as in a ring under a window of W: each rank's rows that another reads, and its own to itself.

    Returns:
        per rank, the local rows that it gets, and how many it gives; the order in the sequence of W - 1 zeros and
        what this rank gets then, in rank order; where this rank's rows are in that order, behind the zeros.
    """
    steps = ring_steps(plan.layout, plan.mask.windowed(width), plan.sequence_length, plan.rank)
    given = [step.send for step in sorted(steps, key=lambda step: step.target)]
    taken = [count_rows(step.receive) for step in sorted(steps, key=lambda step: step.source)]
    held = list(plan.layout.spans[plan.rank])
    for _, segments in documents_of(plan.layout, plan.mask, plan.sequence_length):
        held += [(max(segments[0].start, s.start - width + 1), s.stop) for s in segments if s.rank == plan.rank]
    places, order, own, place = [*accumulate(taken, initial=width - 1)], [(0, width - 1)], list[Span](), 0
    for rank, _, start, stop in chain(*cut_by_document(plan.layout, merge_spans(held))):
        order.append((places[rank], places[rank] + stop - start))
        own += [(place, place + stop - start)] if rank == plan.rank else []
        places[rank], place = places[rank] + stop - start, place + stop - start
    return given, taken, tuple(order), tuple(own)


def _trade(parts: Sequence[Tensor], rows: list[int], plan: Plan) -> list[Tensor]:
    """Give part i `[B, s, C]` to rank i, and get so many rows from it."""
    shapes = [[(len(parts[0]), count, parts[0].shape[2])] for count in rows]
    flat = [x.contiguous().flatten() for x in parts]  # a single row flattens to a view, whatever its stride
    return [x for (x,) in find_group(plan.groups, plan.ranks).uneven_all_to_all(flat, shapes)]


def _hold(x: Tensor, plan: Plan, width: int) -> Tensor:
    """W - 1 zeros, and behind them what this rank gets, `[B, held, C]`."""
    given, taken, *_ = _find_reads(plan, width)
    got = _trade([rows_in(x, spans) for spans in given], taken, plan)
    return torch.cat([x.new_zeros(len(x), width - 1, x.shape[2]), *got], 1)


def _places(plan: Plan, width: int, like: Tensor) -> tuple[Tensor, ...]:
    """`_find_reads`' order, and where this rank's rows are in it, as indices on the device of `like`.

    To slice each span would take a gradient of the whole sequence for each document that lies apart.
    """

    def make() -> tuple[Tensor, ...]:
        indices = (torch.cat([torch.arange(*span) for span in spans]) for spans in _find_reads(plan, width)[2:])
        return tuple(to_device(index, like) for index in indices)

    return ROWS.get(("convolution", plan, width), like, make)


def _convolve(plan: Plan, silu: bool, held: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The convolution of a rank's rows; differentiable."""
    width, dtype, own_offsets = weight.shape[1], accumulation_dtype(held.dtype), document_offsets(plan, held)
    order, own = _places(plan, width, held)
    # Widened once, so that the gradients of all reads add up in fp32.
    rows = held.to(dtype).index_select(1, order)
    offsets = own_offsets.new_full((len(own_offsets), rows.shape[1] - width + 1, 1), -1)
    offsets.index_copy_(1, own, own_offsets.unsqueeze(-1))
    total = rows.new_zeros(()) if bias is None else bias.to(dtype)
    for distance in range(width):
        # What lies further back than the document's first token is another's.
        read = rows[:, width - 1 - distance : rows.shape[1] - distance].where(offsets >= distance, 0.0)
        total = total + read * weight[:, width - 1 - distance].to(dtype)
    total = (F.silu(total) if silu else total).where(offsets >= 0, 0.0)
    return total.to(held.dtype).index_select(1, own)


@operator("causal_conv")
def convolve(inputs: list[Tensor], handle: Tensor, silu: bool) -> Tensor:
    """`[B, S/P, C]` of x, weight and perhaps bias."""
    plan, (x, *parameters) = find_plan(handle), inputs
    plan.check_batch(len(x))
    return _convolve(plan, silu, _hold(x, plan, parameters[0].shape[1]), *parameters)


@operator("causal_conv_backward")
def convolve_backward(dout: Tensor, inputs: list[Tensor], handle: Tensor, silu: bool) -> list[Tensor]:
    """The gradients of the inputs."""
    plan, (x, *parameters) = find_plan(handle), inputs
    width = parameters[0].shape[1]
    with with_autograd(), torch.enable_grad():
        leaves = [y.detach().requires_grad_() for y in (_hold(x, plan, width), *parameters)]
        dheld, *dparameters = torch.autograd.grad(_convolve(plan, silu, *leaves), leaves, dout)
    given, taken, *_ = _find_reads(plan, width)
    _, *parts = dheld.split([width - 1, *taken], 1)
    dx = x.new_zeros(x.shape)
    for spans, part in zip(given, _trade(parts, list(map(count_rows, given)), plan), strict=True):
        add_rows(dx, spans, part)
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
