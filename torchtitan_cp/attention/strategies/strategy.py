"""The interface of a strategy, and what all strategies share: a rank's computation on the keys at hand."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.collectives import Group
from torchtitan_cp.attention.kernels import Kernel, ScoreMod
from torchtitan_cp.attention.kernels.packed import Packed, pack
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import ALL, GradientSum, Rows, RunningSoftmax
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.tiles import Tile, rows_of


@dataclass(frozen=True)
class Call:
    """How one attention is carried out.

    Attributes:
        plan: this rank's.
        kernel: the local kernel.
        scores: scale and soft-cap.
        key_heads: Hkv.
        ring_group: the ranks across which KV travels.
        all_to_all_group: the ranks that trade heads for sequence.
        sinks: `[Hq]` logits, or None.
    """

    plan: Plan
    kernel: Kernel
    scores: ScoreMod
    key_heads: int
    ring_group: Group
    all_to_all_group: Group
    sinks: Tensor | None = None

    def for_heads(self, heads: slice) -> "Call":
        """The call for some of the query heads; sinks of heads beyond Hq are zero."""
        if self.sinks is None:
            return self
        return replace(self, sinks=F.pad(self.sinks, (0, max(0, heads.stop - len(self.sinks))))[heads])


class Residuals(NamedTuple):
    """What the backward needs, sharded as the strategy computed it.

    A strategy that does not trade heads needs only its inputs and outputs, which autograd saves anyway.

    Attributes:
        q: `[B, s, hq, Dqk]`; k: `[B, s, hkv, Dqk]`; v: `[B, s, hkv, Dv]`.
        out: `[B, s, hq, Dv]`; lse: `[B, s, hq]`, with the sink in it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Strategy:
    """Attention across a group of ranks; a plan for one rank names the ring.

    Attributes:
        forward: (q, k, v, call) -> (out, lse, residuals); q `[B, S/P, Hq, Dqk]`, k `[B, S/P, Hkv, Dqk]`,
            v `[B, S/P, Hkv, Dv]`, out `[B, S/P, Hq, Dv]` in q's dtype, lse `[B, S/P, Hq]`.
        backward: (dout, residuals, call) -> (dq, dk, dv, dsinks), the first three in the inputs' dtypes, dsinks `[Hq]`
            of this rank's rows in their accumulation dtype; None without sinks.
        uses_all_to_all: whether the ranks of an all-to-all group trade heads for sequence.
        gathers_keys: whether it computes the plan's `gathered_tiles`, on all keys, instead of the tiles of its steps.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor, Residuals]]
    backward: Callable[[Tensor, Residuals, Call], tuple[Tensor, Tensor, Tensor, Tensor | None]]
    uses_all_to_all: bool = False
    gathers_keys: bool = False


class KeyBlock(NamedTuple):
    """Keys and values that a rank has received, and the tiles that read them.

    Attributes:
        k: `[B, rows, Hkv, Dqk]`; v: `[B, rows, Hkv, Dv]`.
        tiles: the tiles; their keys index these rows.
        scores: how scores of this rank's queries and these keys are made.
    """

    k: Tensor
    v: Tensor
    tiles: tuple[Tile, ...]
    scores: ScoreMod


def add_outputs(softmax: RunningSoftmax, q: Tensor, block: KeyBlock, kernel: Kernel) -> None:
    """Attend `q` to the keys of a block, and merge the outputs."""
    for call in _kernel_calls(block, kernel, q):
        outputs = call.run_kernel(kernel.forward, q[call.queries], block.k[call.keys], block.v[call.keys])
        softmax.add(call.queries, *outputs)


def add_gradients(sums: Sequence[GradientSum], residuals: tuple[Tensor, ...], block: KeyBlock, kernel: Kernel) -> None:
    """Add the block's contributions to (dq, dk, dv).

    Args:
        sums: the gradients of q's rows, and of the block's k and v.
        residuals: dout, q, out, lse of all local rows.
    """
    for call in _kernel_calls(block, kernel, residuals[1]):
        dout, q, out, lse = (x[call.queries] for x in residuals)
        gradients = call.run_kernel(kernel.backward, dout, q, block.k[call.keys], block.v[call.keys], out, lse)
        for total, rows, gradient in zip(sums, (call.queries, call.keys, call.keys), gradients, strict=True):
            total.add(rows, gradient)


class _KernelCall(NamedTuple):
    """What one call of a kernel computes. `shape` is a tile's band, packed tiles, or the tiles of a whole step."""

    queries: Rows
    keys: Rows
    shape: Band | Packed | tuple[Tile, ...]
    scores: ScoreMod
    flipped: bool = False

    def run_kernel(self, function: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
        """Call a kernel's forward or backward: on reversed rows if flipped, without a batch dim if packed."""
        if self.flipped:
            return tuple(x.flip(1) for x in function(*(x.flip(1) for x in rows), self.shape, self.scores))
        if not isinstance(self.shape, Packed) or rows[0].ndim == 3:
            return function(*rows, self.shape, self.scores)
        results = function(*(x.flatten(0, 1) for x in rows), self.shape, self.scores)
        return tuple(x.unflatten(0, (len(rows[0]), -1)) for x in results)


def _kernel_calls(block: KeyBlock, kernel: Kernel, q: Tensor) -> Iterator[_KernelCall]:
    for kind, group in kernel.calls(block.tiles):
        if kernel.whole_steps:
            yield _KernelCall(ALL, ALL, group, block.scores)
        elif len(group) > 1:
            yield _KernelCall(*pack(group, kind, q), block.scores)
        else:
            (tile,) = group
            yield _KernelCall(*rows_of(tile), tile.band, block.scores, tile.flipped)
