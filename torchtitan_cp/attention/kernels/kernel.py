"""The interface of a kernel: a forward, a backward, and what it supports."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.caching import keep_newest
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.tiles import Tile, dense_parts

HALF = (torch.bfloat16, torch.float16)
WIDEST = 1 << 16  # head dim; no model comes close


class Case(NamedTuple):
    """The inputs that a kernel is chosen for.

    Attributes:
        device: its type, as in torch.device.
        dtype: of q, k, v.
        qk_dim: Dqk, head dim of queries and keys; v_dim: Dv, of values.
        softcap: whether scores are capped.
        dense: whether all tiles are full or causal: neither a window nor packed documents.
        capability: (major, minor) compute capability of a CUDA device; None: unknown, or another device.
        deterministic: whether the backward must give the same bits in every run.
        backward: whether the kernel is to compute the backward, otherwise the forward.
        planned: whether only a plan is made, for a machine whose packages are not known: a kernel that needs one is
            then taken by its name, and never by `auto`.
    """

    device: str
    dtype: torch.dtype
    qk_dim: int
    v_dim: int
    softcap: bool = False
    dense: bool = True
    capability: tuple[int, int] | None = None
    deterministic: bool = False
    backward: bool = False
    planned: bool = False


class ScoreMod(NamedTuple):
    """How q . k becomes a score.

    Attributes:
        scale: multiplies the product.
        softcap: above 0, a scaled score s becomes softcap tanh(s / softcap).
    """

    scale: float
    softcap: float = 0.0


@dataclass(frozen=True)
class Kernel:
    """A local attention kernel.

    Attributes:
        forward: (q, k, v, band, scores) -> (out, lse); out in q's dtype or a wider one.
        backward: (dout, q, k, v, out, lse, band, scores) -> (dq, dk, dv), where out and lse are those of
            the whole row, merged over all its tiles; gradients come in the inputs' dtype or a wider one.
        device: the device type that it runs on; None: any.
        dtypes: supported dtypes of q, k and v.
        head_dims: supported head dims: of the wider of Dqk and Dv if it `pads_dims`, else of both.
        takes_band: (queries, keys, band) -> whether one call computes such a tile. Every kernel takes full rectangles
            and causal squares; other tiles are split into these shapes for it.
        kind: (queries, keys, band) -> the kind of a tile: tiles of one kind can share a call of `[T, H, D]` rows. None
            if a call takes a single tile.
        whole_steps: whether one call does all tiles of a step. Forward and backward then take the tiles instead of a
            band, and rows that no tile reaches have out 0 and lse -inf.
        has_softcap: whether it supports a soft-cap.
        deterministic: whether its backward gives the same bits in every run.
        refuses: (case) -> why it cannot run the case, or None: what the fields above do not say.
        missing: () -> the package that it lacks here and how to install it, or ""; None: it needs none beside torch.
        prepare: (tiles of a step, batch rows or 1 if they are alike, queries, keys) -> anything: does the host's part
            of a call ahead of it.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Any, ScoreMod], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Any, ScoreMod], tuple[Tensor, Tensor, Tensor]]
    device: str | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, *HALF)
    head_dims: range = range(1, WIDEST)
    pads_dims: bool = False
    takes_band: Callable[[int, int, Band], bool] = lambda queries, keys, band: False
    kind: Callable[[int, int, Band], Hashable] | None = None
    whole_steps: bool = False
    has_softcap: bool = False
    deterministic: bool = True
    refuses: Callable[[Case], str | None] = lambda case: None
    missing: Callable[[], str] | None = None
    prepare: Callable[[tuple[Tile, ...], int, int, int], object] | None = None

    def refusal(self, case: Case) -> str | None:
        """Why it cannot run a case, or None."""
        dims = [max(case.qk_dim, case.v_dim)] if self.pads_dims else [case.qk_dim, case.v_dim]
        supported = f"from {self.head_dims[0]} to {self.head_dims[-1]} in steps of {self.head_dims.step}"
        dtypes = " or ".join(map(str, self.dtypes))
        refusals = {
            "its backward is not deterministic": case.deterministic and not self.deterministic,
            "it has no logit soft-cap": case.softcap and not self.has_softcap,
            f"it runs on {self.device}, not {case.device}": self.device not in (None, case.device),
            f"it takes {dtypes}, not {case.dtype}": case.dtype not in self.dtypes,
            f"it takes head dims {supported}, not {' and '.join(map(str, dims))}": any(
                dim not in self.head_dims for dim in dims
            ),
        }
        lacks = self.missing() if self.missing and not case.planned else ""
        return next((why for why, holds in refusals.items() if holds), None) or self.refuses(case) or lacks or None

    def plain_tiles(self, tiles: tuple[Tile, ...]) -> list[Tile]:
        """The same pairs, as tiles that the kernel takes."""
        plain = []
        for tile in tiles:
            queries, keys = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
            if self.takes_band(queries, keys, tile.band):
                plain.append(tile)
            else:
                parts = dense_parts(queries, keys, tile.band)
                plain += [part.moved(tile.q_start, tile.k_start)._replace(row=tile.row) for part in parts]
        return plain

    @keep_newest
    def calls(self, tiles: tuple[Tile, ...]) -> tuple[tuple[Hashable, tuple[Tile, ...]], ...]:
        """(kind, tiles) of each call; the tiles of a call ascend and share no row of queries or keys."""
        if self.whole_steps:
            return ((None, tiles),) if tiles else ()
        groups: dict[Hashable, list[list[Tile]]] = {}
        for number, tile in enumerate(self.plain_tiles(tiles)):
            kind: Hashable = number  # a kind of its own
            if self.kind and not tile.flipped:
                kind = self.kind(tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, tile.band)
            same_kind = groups.setdefault(kind, [])
            group = next((group for group in same_kind if group[-1].precedes(tile)), [])
            if not group:
                same_kind.append(group)
            group.append(tile)
        return tuple((kind, tuple(group)) for kind, same_kind in groups.items() for group in same_kind)


def same_dims(*tensors: Tensor) -> list[Tensor]:
    """The tensors with their head dims padded with zeros to the largest of them.

    A zero in a query or key adds nothing to a score, and a zero column of values gives a zero column of output. So
    attention with Dqk != Dv (multi-head latent attention) runs on a kernel that needs them equal.
    """
    widest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]
