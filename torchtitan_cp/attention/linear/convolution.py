"""A short causal convolution of each channel, over documents that lie on several ranks.

The first positions of a run need the W - 1 positions before them, which may lie on up to W - 1 other ranks. Those are
what a ring sends under a window of W, so they are sent like keys, and their gradients are sent back.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.autograd import Context
from torchtitan_cp.attention.caching import keep_newest, to_device
from torchtitan_cp.attention.collectives import find_group
from torchtitan_cp.attention.compiling import compile_on_cuda
from torchtitan_cp.attention.errors import check_name
from torchtitan_cp.attention.layout import cut_by_document, documents_of
from torchtitan_cp.attention.linear.operator import check_inputs
from torchtitan_cp.attention.linear.states import INDEX_CACHE, document_offsets
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

    Token t of a document becomes the sum over w < W of weight[:, W - 1 - w] x[t - w], where x is zero before the
    document's first token.

    Args:
        x: `[B, S/P, C]`.
        weight: `[C, W]`, torch.nn.Conv1d's without its middle dim; the last column is for the token itself. The
            gradients of weight and bias come from this rank's outputs only: sum them over the ranks.
        plan: this rank's, of any layout and packing; its mask is causal and has no window.
        bias: `[C]`; weight and bias may have another floating dtype than x.
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
    fits = x.ndim == 3 and x.shape[1] == plan.local_tokens and weight.ndim == 2 and len(weight) == x.shape[2]
    fits = fits and (bias is None or bias.shape == x.shape[2:])
    check_inputs(plan, fits, "causal_conv takes x [B, S/P, C], weight [C, W] and bias [C]", inputs)
    return convolve(list(inputs.values()), plan.handle, activation is not None)


@keep_newest
def _plan_exchange(plan: Plan, width: int) -> tuple[list[Spans], list[int], Spans, Spans]:
    """The rows that this rank sends and receives, its own among them, and their order in the sequence.

    Returns:
        (for each rank, the local rows that it is sent; how many rows each rank sends here; the spans that put W - 1
        zeros followed by the received rows, by rank, in the order of the sequence; the spans of this rank's rows in
        that order, counted after the zeros).
    """
    steps = ring_steps(plan.layout, plan.mask.windowed(width), plan.sequence_length, plan.rank)
    sent = [step.send for step in sorted(steps, key=lambda step: step.target)]
    received = [count_rows(step.receive) for step in sorted(steps, key=lambda step: step.source)]
    read = list(plan.layout.spans[plan.rank])
    for _, segments in documents_of(plan.layout, plan.mask, plan.sequence_length):
        read += [(max(segments[0].start, s.start - width + 1), s.stop) for s in segments if s.rank == plan.rank]
    next_row = [*accumulate(received, initial=width - 1)]
    order, local, position = [(0, width - 1)], list[Span](), 0
    for rank, _, start, stop in chain(*cut_by_document(plan.layout, merge_spans(read))):
        rows = stop - start
        order.append((next_row[rank], next_row[rank] + rows))
        if rank == plan.rank:
            local.append((position, position + rows))
        next_row[rank] += rows
        position += rows
    return sent, received, tuple(order), tuple(local)


def _trade(parts: Sequence[Tensor], counts: list[int], plan: Plan) -> list[Tensor]:
    """Send part i `[B, s, C]` to rank i, and receive `counts[i]` rows from it."""
    shapes = [[(len(parts[0]), count, parts[0].shape[2])] for count in counts]
    flat = [x.contiguous().flatten() for x in parts]  # a single row flattens to a view, whatever its stride
    return [x for (x,) in find_group(plan.groups, plan.ranks).uneven_all_to_all(flat, shapes)]


def _gather_rows(x: Tensor, plan: Plan, width: int) -> Tensor:
    """W - 1 zeros, and after them the rows that this rank receives, `[B, s, C]`."""
    sent, counts, *_ = _plan_exchange(plan, width)
    received = _trade([rows_in(x, spans) for spans in sent], counts, plan)
    return torch.cat([x.new_zeros(len(x), width - 1, x.shape[2]), *received], 1)


class _Indices(NamedTuple):
    """Which rows a convolution reads, on the device. See `_gather_rows` for the rows, R in number with the zeros.

    Gathering by an index for each distance, forward and backward, is what torch.compile fuses into one pass.

    Attributes:
        reads: for each distance w < W, `[S/P]` int64: the row that a local token reads.
        readers: for each distance, `[R - W + 1]` int64: the local token that reads a received row, or -1.
        offsets: `[1 or B, S/P, 1]` int64, see `document_offsets`. A token nearer than w to its document's start reads
            nothing at distance w.
    """

    reads: tuple[Tensor, ...]
    readers: tuple[Tensor, ...]
    offsets: Tensor


def _indices(plan: Plan, width: int, like: Tensor) -> _Indices:
    """On the device of `like`."""

    def make() -> tuple[Tensor, ...]:
        order, local = (torch.cat([torch.arange(*span) for span in spans]) for spans in _plan_exchange(plan, width)[2:])
        reads = [order[local + width - 1 - distance] for distance in range(width)]
        tokens = torch.full((len(order),), -1)  # by place in the order, after the zeros; -1: of another rank
        tokens[local] = torch.arange(len(local))
        readers = [
            torch.full((len(order),), -1).index_copy(0, order[width - 1 :], tokens[distance:][: len(order) - width + 1])
            for distance in range(width)
        ]
        return tuple(to_device(index, like) for index in (*reads, *(x[width - 1 :] for x in readers)))

    indices = INDEX_CACHE.get(("convolution", plan, width), like, make)
    return _Indices(indices[:width], indices[width:], document_offsets(plan, like).unsqueeze(-1))


def _read(gathered: Tensor, weight: Tensor, bias: Tensor | None, indices: _Indices) -> tuple[list[Tensor], Tensor]:
    """(for each distance, the rows `[B, S/P, C]` that are read; their weighted sum in the accumulation dtype)."""
    dtype = accumulation_dtype(gathered.dtype)
    total = gathered.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    rows = [
        gathered.index_select(1, index).where(indices.offsets >= distance, 0.0)
        for distance, index in enumerate(indices.reads)
    ]
    for read, taps in zip(rows, weight.to(dtype).flip(1).unbind(1), strict=True):
        total = total + read * taps
    return rows, total


def _forward(gathered: Tensor, weight: Tensor, bias: Tensor | None, indices: _Indices, silu: bool) -> Tensor:
    """The convolution of this rank's rows."""
    _, total = _read(gathered, weight, bias, indices)
    return (F.silu(total) if silu else total).where(indices.offsets >= 0, 0.0).to(gathered.dtype)


def _gradients(
    dout: Tensor, gathered: Tensor, weight: Tensor, bias: Tensor | None, indices: _Indices, silu: bool
) -> tuple[Tensor, ...]:
    """The gradients of the received rows, of weight and, if there is one, of bias, in their dtypes."""
    rows, total = _read(gathered, weight, bias, indices)
    dtotal = dout.to(total.dtype).where(indices.offsets >= 0, 0.0)
    if silu:
        gate = total.sigmoid()
        dtotal = dtotal * (gate * (1 + total * (1 - gate)))
    taps = [(dtotal * read).sum((0, 1)) for read in rows]
    drows = dtotal.new_zeros(())
    for distance, index in enumerate(indices.readers):
        token = index.clamp(min=0)
        reads = (indices.offsets.index_select(1, token) >= distance) & (index >= 0).unsqueeze(-1)
        drows = drows + dtotal.index_select(1, token).where(reads, 0.0) * weight[:, -1 - distance].to(dtotal.dtype)
    parameters = [torch.stack(taps[::-1], 1).to(weight.dtype)]
    parameters += [] if bias is None else [dtotal.sum((0, 1)).to(bias.dtype)]
    return drows.to(gathered.dtype), *parameters


@operator("causal_conv")
def convolve(inputs: list[Tensor], handle: Tensor, silu: bool) -> Tensor:
    """`[B, S/P, C]` from x, weight and, if there is one, bias."""
    plan, (x, weight, *bias) = find_plan(handle), inputs
    plan.check_batch(len(x))
    gathered = _gather_rows(x, plan, weight.shape[1])
    of_rows = _indices(plan, weight.shape[1], gathered)
    return compile_on_cuda(_forward, x.is_cuda)(gathered, weight, bias[0] if bias else None, of_rows, silu)


@operator("causal_conv_backward")
def convolve_backward(dout: Tensor, inputs: list[Tensor], handle: Tensor, silu: bool) -> list[Tensor]:
    """The gradients of the inputs."""
    plan, (x, weight, *bias) = find_plan(handle), inputs
    width = weight.shape[1]
    gathered = _gather_rows(x, plan, width)
    of_rows = _indices(plan, width, gathered)
    gradients = compile_on_cuda(_gradients, x.is_cuda)
    drows, *dparameters = gradients(dout, gathered, weight, bias[0] if bias else None, of_rows, silu)
    sent, counts, *_ = _plan_exchange(plan, width)
    parts = drows.split(counts, 1)
    dx = x.new_zeros(x.shape)
    for spans, part in zip(sent, _trade(parts, list(map(count_rows, sent)), plan), strict=True):
        add_rows(dx, spans, part)
    return [dx, *dparameters]


class _Context(Context, Protocol):
    silu: bool


def _save_for_backward(ctx: _Context, inputs: tuple[list[Tensor], Tensor, bool], output: Tensor) -> None:
    tensors, handle, ctx.silu = inputs
    ctx.save_for_backward(handle, *tensors)


def _backward(ctx: _Context, dout: Tensor) -> tuple[list[Tensor], None, None]:
    handle, *tensors = ctx.saved_tensors
    return torch.ops.torchtitan_cp.causal_conv_backward(dout, tensors, handle, ctx.silu), None, None


convolve.register_fake(lambda inputs, *_: inputs[0].new_empty(inputs[0].shape))
convolve_backward.register_fake(lambda dout, inputs, *_: [x.new_empty(x.shape) for x in inputs])
convolve.register_autograd(_backward, setup_context=_save_for_backward)

CONVOLUTION = torch.ops.torchtitan_cp.causal_conv.default
