"""A step's tiles on one rank, whatever the exchange that brought the keys."""

from typing import Any

from torch import Tensor

from torchtitan_cp.attention.kernels import Kernel
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax
from torchtitan_cp.attention.tiles import CAUSAL, FULL, Tile, dense_parts, rows_of


def add_outputs(
    softmax: RunningSoftmax, tiles: tuple[Tile, ...], q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, scale: float
) -> None:
    """Attend `q` to the keys of a step, and merge the outputs."""
    if kernel.step_forward and tiles:
        softmax.add((slice(None), slice(None)), *kernel.step_forward(q, k, v, tiles, scale))
        return
    for tile, flipped in plain_tiles(tiles, kernel):
        queries, keys = rows_of(tile)
        rows = (q[queries], k[keys], v[keys])
        if flipped:
            rows = reverse(*rows)
        out, lse = kernel.forward(*rows, tile.band, scale)
        if flipped:
            out, lse = reverse(out, lse)
        softmax.add(queries, out, lse)


def add_gradients(
    sums: tuple[GradientSum, GradientSum, GradientSum],
    tiles: tuple[Tile, ...],
    k: Tensor,
    v: Tensor,
    residuals: tuple[Tensor, Tensor, Tensor, Tensor],
    kernel: Kernel,
    scale: float,
) -> None:
    """Add the step's part of (dq, dk, dv).

    Args:
        sums: of q's rows, and of the step's k and v.
        residuals: dout, q, out, lse of all local rows.
    """
    dq, dk, dv = sums
    dout, q, out, lse = residuals
    if kernel.step_backward and tiles:
        everything = (slice(None), slice(None))
        for total, part in zip(sums, kernel.step_backward(dout, q, k, v, out, lse, tiles, scale), strict=True):
            total.add(everything, part)
        return
    for tile, flipped in plain_tiles(tiles, kernel):
        queries, keys = rows_of(tile)
        rows = (dout[queries], q[queries], k[keys], v[keys], out[queries], lse[queries])
        if flipped:
            rows = reverse(*rows)
        gradients = kernel.backward(*rows, tile.band, scale)
        if flipped:
            gradients = reverse(*gradients)
        dq.add(queries, gradients[0])
        dk.add(keys, gradients[1])
        dv.add(keys, gradients[2])


def plain_tiles(tiles: tuple[Tile, ...], kernel: Kernel) -> list[tuple[Tile, bool]]:
    """Tiles as the kernel takes them, each with whether its rows must be given in reverse."""
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


def reverse(*tensors: Tensor) -> Any:
    """Rows last to first: a triangle of later keys becomes one of earlier keys."""
    return tuple(x.flip(1) for x in tensors)
