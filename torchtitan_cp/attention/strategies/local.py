"""A step's tiles on one rank, whichever exchange brought the keys."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchtitan_cp.attention.kernels import Kernel, Scores
from torchtitan_cp.attention.merge import ALL, GradientSum, Rows, RunningSoftmax
from torchtitan_cp.attention.tiles import Tile, dense_parts, rows_of


def add_outputs(
    softmax: RunningSoftmax, tiles: tuple[Tile, ...], q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, scores: Scores
) -> None:
    """Attend `q` to the keys of a step, and merge the outputs."""
    for call in _kernel_calls(tiles, kernel, scores):
        softmax.add(call.queries, *call.run(kernel.forward, q[call.queries], k[call.keys], v[call.keys]))


def add_gradients(
    sums: Sequence[GradientSum],
    tiles: tuple[Tile, ...],
    k: Tensor,
    v: Tensor,
    residuals: tuple[Tensor, Tensor, Tensor, Tensor],
    kernel: Kernel,
    scores: Scores,
) -> None:
    """Add the step's contributions to (dq, dk, dv).

    Args:
        sums: of q's rows, and of the step's k and v.
        residuals: dout, q, out, lse of all local rows.
    """
    for call in _kernel_calls(tiles, kernel, scores):
        dout, q, out, lse = (x[call.queries] for x in residuals)
        gradients = call.run(kernel.backward, dout, q, k[call.keys], v[call.keys], out, lse)
        for total, rows, gradient in zip(sums, (call.queries, call.keys, call.keys), gradients, strict=True):
            total.add(rows, gradient)


class _KernelCall(NamedTuple):
    """What one call of a kernel computes: rows, and their tile's band or the tiles of a whole step."""

    queries: Rows
    keys: Rows
    shape: Any
    scores: Scores
    flipped: bool = False

    def run(self, function: Callable[..., Any], *rows: Tensor) -> Any:
        """Call a kernel's forward or backward, on reversed rows if flipped."""
        if not self.flipped:
            return function(*rows, self.shape, self.scores)
        return tuple(x.flip(1) for x in function(*(x.flip(1) for x in rows), self.shape, self.scores))


def _kernel_calls(tiles: tuple[Tile, ...], kernel: Kernel, scores: Scores) -> list[_KernelCall]:
    if kernel.whole_steps:
        return [_KernelCall(ALL, ALL, tiles, scores)] if tiles else []
    plain = plain_tiles(tiles, kernel)
    return [_KernelCall(*rows_of(tile), tile.band, scores.of_tile(tile), tile.flipped) for tile in plain]


def plain_tiles(tiles: tuple[Tile, ...], kernel: Kernel) -> list[Tile]:
    """Tiles as the kernel takes them."""
    plain = []
    for tile in tiles:
        queries, keys = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
        if kernel.takes_band(queries, keys, tile.band):
            plain.append(tile)
        else:
            parts = dense_parts(queries, keys, tile.band)
            plain += [part.moved(tile.q_start, tile.k_start)._replace(row=tile.row) for part in parts]
    return plain
