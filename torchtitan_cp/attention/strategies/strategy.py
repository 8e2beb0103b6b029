"""What an exchange is: attention forward and backward over the shards of a group."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from torchtitan_cp.attention.kernels import Kernel
from torchtitan_cp.attention.plan import Plan

Forward = Callable[[Tensor, Tensor, Tensor, Plan, Kernel, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Plan, Kernel, float], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True)
class Strategy:
    """Attention across a group.

    Attributes:
        forward: (q, k, v, plan, kernel, scale) -> (out, lse); q `[B, S/P, Hq, D]`, k `[B, S/P, Hkv, D]`,
            v `[B, S/P, Hkv, Dv]`, out `[B, S/P, Hq, Dv]`, lse `[B, S/P, Hq]`.
        backward: (dout, q, k, v, out, lse, plan, kernel, scale) -> (dq, dk, dv) in the inputs' dtypes.
    """

    forward: Forward
    backward: Backward
