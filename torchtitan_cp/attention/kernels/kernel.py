"""The interface of a kernel: two functions, and what it can do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.tiles import Tile

Forward = Callable[[Tensor, Tensor, Tensor, Band, float], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Band, float], tuple[Tensor, Tensor, Tensor]]
StepForward = Callable[[Tensor, Tensor, Tensor, tuple[Tile, ...], float], tuple[Tensor, Tensor]]
StepBackward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tile, ...], float], tuple[Tensor, Tensor, Tensor]
]


class Case(NamedTuple):
    """The inputs that a kernel is chosen for.

    Attributes:
        device: type, as in torch.device.
        dtype: of q, k, v.
        qk_dim: Dqk, head dim of queries and keys; v_dim: Dv, of values.
        softcap: whether scores are capped; alibi: whether they have linear biases.
    """

    device: str
    dtype: torch.dtype
    qk_dim: int
    v_dim: int
    softcap: bool = False
    alibi: bool = False


class Alibi(NamedTuple):
    """Linear biases: slope times the distance of query and key is subtracted from a score.

    Source: Press et al., Train Short, Test Long, 2022.

    Attributes:
        slopes: `[Hq]` fp32 or wider.
        queries: `[Sq]` int64, global positions of the queries; keys: `[Sk]` int64, of the keys.
    """

    slopes: Tensor
    queries: Tensor
    keys: Tensor


def any_band(queries: int, keys: int, band: Band) -> bool:
    return True


@dataclass(frozen=True)
class Kernel:
    """A local attention kernel.

    Attributes:
        forward: (q, k, v, band, scale) -> (out, lse).
        backward: (dout, q, k, v, out, lse, band, scale) -> (dq, dk, dv), where out and lse are those of
            the whole row, merged over all its tiles; gradients come in the inputs' dtype or a wider one.
        refusal: why it cannot run a case, or None.
        takes_band: (queries, keys, band) -> whether one call computes that tile. Every kernel takes full
            rectangles and causal squares; other tiles are split into these shapes for it.
        step_forward, step_backward: the same for all tiles of a step in one call, from kernels that take
            any mask; rows that no tile reaches have out 0 and lse -inf.
        merging: the same kernel with out in fp32 (fp64 for fp64), for outputs that are merged with others; None if it
            returns q's dtype only.
        softcapped: cap -> the same kernel with scores s replaced by cap tanh(s / cap); None if it cannot.
        biased: linear biases of a step's rows -> the same kernel with them; None if it cannot.
        for_tile: of a biased kernel that runs tile by tile: tile -> the kernel with the biases of its rows.
    """

    forward: Forward
    backward: Backward
    refusal: Callable[[Case], str | None]
    takes_band: Callable[[int, int, Band], bool] = lambda queries, keys, band: False
    step_forward: StepForward | None = None
    step_backward: StepBackward | None = None
    merging: "Kernel | None" = None
    softcapped: "Callable[[float], Kernel] | None" = None
    biased: "Callable[[Alibi], Kernel] | None" = None
    for_tile: "Callable[[Tile], Kernel] | None" = None
