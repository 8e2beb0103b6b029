"""A step's tiles on one rank, whichever exchange brought the keys."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchtitan_cp.attention.kernels import Kernel
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import ALL, GradientSum, RunningSoftmax
from torchtitan_cp.attention.tiles import CAUSAL, FULL, Tile, dense_parts, rows_of


def add_outputs(
    softmax: RunningSoftmax, tiles: tuple[Tile, ...], q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, scale: float
) -> None:
    """Attend `q` to the keys of a step, and merge the outputs."""
    if kernel.step_forward and tiles:
        softmax.add(ALL, *kernel.step_forward(q, k, v, tiles, scale))
        return
    for tile, flipped in plain_tiles(tiles, kernel):
        queries, keys = rows_of(tile)
        forward = kernel.for_tile(tile).forward if kernel.for_tile else kernel.forward
        softmax.add(queries, *_run(forward, (q[queries], k[keys], v[keys]), tile.band, scale, flipped))


def add_gradients(
    sums: Sequence[GradientSum],
    tiles: tuple[Tile, ...],
    k: Tensor,
    v: Tensor,
    residuals: tuple[Tensor, Tensor, Tensor, Tensor],
    kernel: Kernel,
    scale: float,
) -> None:
    """Add the step's contributions to (dq, dk, dv).

    Args:
        sums: of q's rows, and of the step's k and v.
        residuals: dout, q, out, lse of all local rows.
    """
    dout, q, out, lse = residuals
    if kernel.step_backward and tiles:
        for total, gradient in zip(sums, kernel.step_backward(dout, q, k, v, out, lse, tiles, scale), strict=True):
            total.add(ALL, gradient)
        return
    for tile, flipped in plain_tiles(tiles, kernel):
        queries, keys = rows_of(tile)
        backward = kernel.for_tile(tile).backward if kernel.for_tile else kernel.backward
        rows = (dout[queries], q[queries], k[keys], v[keys], out[queries], lse[queries])
        gradients = _run(backward, rows, tile.band, scale, flipped)
        for total, index, gradient in zip(sums, (queries, keys, keys), gradients, strict=True):
            total.add(index, gradient)


def _run(function: Callable[..., Any], rows: tuple[Tensor, ...], band: Band, scale: float, flipped: bool) -> Any:
    """Call a kernel; `flipped` reverses its rows, so that a triangle of later keys becomes one of earlier keys."""
    if not flipped:
        return function(*rows, band, scale)
    return tuple(x.flip(1) for x in function(*(x.flip(1) for x in rows), band, scale))


def plain_tiles(tiles: tuple[Tile, ...], kernel: Kernel) -> list[tuple[Tile, bool]]:
    """Tiles as the kernel takes them, each with whether its rows must be reversed."""
    plain = []
    for tile in tiles:
        queries, keys = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
        if kernel.takes_band(queries, keys, tile.band):
            plain.append((tile, False))
            continue
        for part in dense_parts(queries, keys, tile.band):
            q_rows = (tile.q_start + part.q_start, tile.q_start + part.q_stop)
            k_rows = (tile.k_start + part.k_start, tile.k_start + part.k_stop)
            plain.append((Tile(tile.row, *q_rows, *k_rows, CAUSAL if part.causal else FULL), part.flipped))
    return plain
