"""What an exchange is: attention forward and backward over the shards of a group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from torchtitan_cp.attention.collectives import Group
from torchtitan_cp.attention.kernels import Alibi, Kernel
from torchtitan_cp.attention.plan import Plan

ALL_HEADS = slice(None)


@dataclass(frozen=True)
class Call:
    """How one attention is carried out.

    Attributes:
        plan: this rank's.
        kernel: the local kernel.
        scale: of the scores.
        key_heads: Hkv.
        ring: the group across which KV travels.
        trade: the group within which heads are traded for sequence.
        slopes: `[Hq]` of linear biases, or None.
    """

    plan: Plan
    kernel: Kernel
    scale: float
    key_heads: int
    ring: Group
    trade: Group
    slopes: Tensor | None = None

    def kernel_for(self, queries: Callable[[], Tensor], keys: Callable[[], Tensor], heads: slice = ALL_HEADS) -> Kernel:
        """The kernel for a step, with linear biases if there are any.

        Args:
            queries, keys: give the global positions of the step's rows, int64 on CPU; asked only for biases.
            heads: the query heads at hand.
        """
        if self.slopes is None:
            return self.kernel
        assert self.kernel.biased
        slopes = self.slopes[heads]
        return self.kernel.biased(Alibi(slopes, queries().to(slopes.device), keys().to(slopes.device)))


class Residuals(NamedTuple):
    """What the backward needs, in the sharding in which the exchange computed it.

    Attributes:
        q: `[B, s, hq, Dqk]`; k: `[B, s, hkv, Dqk]`; v: `[B, s, hkv, Dv]`.
        out: `[B, s, hq, Dv]`; lse: `[B, s, hq]`, with the sink in it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, Call], tuple[Tensor, Tensor, Residuals]]
Backward = Callable[[Tensor, Residuals, Tensor | None, Call], tuple[Tensor, Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Strategy:
    """Attention across a group.

    Attributes:
        forward: (q, k, v, sinks, call) -> (out, lse, residuals); q `[B, S/P, Hq, Dqk]`,
            k `[B, S/P, Hkv, Dqk]`, v `[B, S/P, Hkv, Dv]`, sinks `[Hq]` or None, out `[B, S/P, Hq, Dv]` in q's
            dtype, lse `[B, S/P, Hq]`.
        backward: (dout, residuals, sinks, call) -> (dq, dk, dv, dsinks), the first three in the inputs'
            dtypes, dsinks `[Hq]` of this rank's rows in a wide dtype, or None.
    """

    forward: Forward
    backward: Backward
