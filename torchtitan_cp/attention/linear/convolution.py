"""A short causal convolution of each channel, over documents that lie on several ranks.

The first positions of a run want the W - 1 before them, wherever these are: on up to W - 1 other ranks. They travel
there, and backward their gradients travel home.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.compiling import above_autograd
from torchtitan_cp.attention.errors import PlanError, check_name
from torchtitan_cp.attention.linear.operator import check_mask
from torchtitan_cp.attention.linear.rows import KEPT, document_offsets
from torchtitan_cp.attention.linear.states import cp_group
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.operator import UNSAFE
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.plan_registry import find_plan

ACTIVATIONS = ("silu",)


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
        check_name("activation", activation, ACTIVATIONS)
    check_mask(plan)
    if (
        x.ndim != 3
        or weight.ndim != 2
        or len(weight) != x.shape[-1]
        or (bias is not None and bias.shape != x.shape[2:])
    ):
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {None if bias is None else tuple(bias.shape)}"
        raise PlanError(f"causal_conv takes x [B, S/P, C], weight [C, W] and bias [C], got {shapes}")
    if x.shape[1] != plan.local_tokens:
        raise PlanError(f"the plan holds {plan.local_tokens} tokens a rank, got x {tuple(x.shape)}")
    return convolve(x, weight, bias, plan.handle, activation is not None)


class Move(NamedTuple):
    """Consecutive rows that travel: which rank's, from which row on; to which rank, and to which row on; how many."""

    source: int
    source_row: int
    target: int
    target_row: int
    rows: int

    def back(self) -> "Move":
        """The way home."""
        return Move(self.target, self.target_row, self.source, self.source_row, self.rows)


@lru_cache(maxsize=KEPT)
def halo_moves(plan: Plan, width: int) -> tuple[Move, ...]:
    """What fills the W - 1 rows before each run, as far as its tokens read them; a rank's halos lie one after another.

    Of batch rows that are packed differently, the one that reads most decides.
    """
    first_read: dict[int, int] = {}  # start of a run -> the first position that its tokens read
    for documents in plan.segments:
        for segments in documents:
            for segment in segments[1:]:
                first = max(segments[0].start, segment.start - width + 1)
                first_read[segment.start] = min(first, first_read.get(segment.start, first))
    moves, halos = [], [width - 1] * plan.ranks  # where the halo of each rank's next run ends
    for place, (target, _, start, _) in enumerate(plan.layout.segments):
        end, before = start, place
        while end > first_read.get(start, start):
            before -= 1
            source, local, held, _ = plan.layout.segments[before]
            first = max(held, first_read[start])
            moves.append(Move(source, local + first - held, target, halos[target] + first - start, end - first))
            end = first
        halos[target] += width - 1
    return tuple(moves)


def _carry(x: Tensor, moves: list[Move], onto: Tensor, plan: Plan) -> None:
    """Add rows of `x` `[B, s, C]` on their source to those of `onto` on their target."""
    ranks, (batch, _, channels) = range(plan.ranks), x.shape

    def between(source: int, target: int) -> list[Move]:
        return [move for move in moves if (move.source, move.target) == (source, target)]

    sent = [[x[:, m.source_row : m.source_row + m.rows].flatten() for m in between(plan.rank, rank)] for rank in ranks]
    arriving = [between(rank, plan.rank) for rank in ranks]
    sizes = [[batch * move.rows * channels for move in of_rank] for of_rank in arriving]
    parts = [torch.cat([x.new_empty(0), *of_rank]) for of_rank in sent]
    received = cp_group(plan).exchange(parts, [sum(of_rank) for of_rank in sizes])
    for flat, of_rank, lengths in zip(received, arriving, sizes, strict=True):
        for move, piece in zip(of_rank, flat.split(lengths) if lengths else [], strict=True):
            onto[:, move.target_row : move.target_row + move.rows] += piece.view(batch, move.rows, channels)


def _lengths(plan: Plan, width: int) -> list[int]:
    """Of each run's halo and the run itself, in turn."""
    return [length for start, stop in plan.layout.spans[plan.rank] for length in (width - 1, stop - start)]


def _with_halos(x: Tensor, halos: Tensor, lengths: list[int]) -> Tensor:
    """Each run behind its halo, one after another, `[B, runs (W - 1) + S/P, ..]`."""
    pieces = zip(halos.split(lengths[::2], 1), x.split(lengths[1::2], 1), strict=True)
    return torch.cat([piece for pair in pieces for piece in pair], 1)


def _runs_of(x: Tensor, plan: Plan, width: int) -> tuple[Tensor, Tensor]:
    """(runs behind their halos, how far each row is from its document's first `[1 or B, .., 1]`)."""
    lengths, offsets = _lengths(plan, width), document_offsets(plan, x.device)
    halos = x.new_zeros(len(x), sum(lengths[::2]), x.shape[-1])
    _carry(x, list(halo_moves(plan, width)), halos, plan)
    nowhere = offsets.new_full((len(offsets), halos.shape[1]), -1)
    return _with_halos(x, halos, lengths), _with_halos(offsets, nowhere, lengths).unsqueeze(-1)


def _convolve_runs(
    runs: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, lengths: list[int]
) -> Tensor:
    """The convolution of runs behind their halos, without the halos; differentiable."""
    width, dtype = weight.shape[1], accumulation_dtype(runs.dtype)
    offsets = offsets[:, width - 1 :]
    total = torch.zeros((), dtype=dtype, device=runs.device) if bias is None else bias.to(dtype)
    for distance in range(width):
        # What lies further back than the document's first token is another's.
        read = runs[:, width - 1 - distance : runs.shape[1] - distance].where(offsets >= distance, 0.0)
        total = total + read.to(dtype) * weight[:, width - 1 - distance].to(dtype)
    total = (F.silu(total) if silu else total).where(offsets >= 0, 0.0)
    return torch.cat(total.split(lengths[1:], 1)[::2], 1).to(runs.dtype)


@torch.library.custom_op("torchtitan_cp::causal_conv", mutates_args=(), tags=UNSAFE)
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, silu: bool) -> Tensor:
    """`[B, S/P, C]`."""
    plan, width = find_plan(handle), weight.shape[1]
    return _convolve_runs(*_runs_of(x, plan, width), weight, bias, silu, _lengths(plan, width))


@convolve.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("torchtitan_cp::causal_conv_backward", mutates_args=(), tags=UNSAFE)
def convolve_backward(
    dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias); dbias is empty without a bias."""
    plan, width = find_plan(handle), weight.shape[1]
    lengths = _lengths(plan, width)
    runs, offsets = _runs_of(x, plan, width)
    with above_autograd(), torch.enable_grad():
        leaves = [y.detach().requires_grad_() for y in (runs, weight, bias) if y is not None]
        out = _convolve_runs(leaves[0], offsets, leaves[1], None if bias is None else leaves[2], silu, lengths)
        druns, *dparameters = torch.autograd.grad(out, leaves, dout)
    pieces = druns.split(lengths, 1)
    dx, dhalos = torch.cat(pieces[1::2], 1), torch.cat(pieces[::2], 1)
    _carry(dhalos, [move.back() for move in halo_moves(plan, width)], dx, plan)
    return dx, dparameters[0], dparameters[1] if bias is not None else x.new_empty(0)


@convolve_backward.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, torch.empty_like(weight), x.new_empty(0) if bias is None else torch.empty_like(bias)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    *_, bias, _ = tensors = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.torchtitan_cp.causal_conv_backward(dout, *tensors, ctx.silu)
    return dx, dweight, None if bias is None else dbias, None, None


convolve.register_autograd(_backward, setup_context=_save_for_backward)

CONVOLUTION = torch.ops.torchtitan_cp.causal_conv.default
