"""The interface of an exchange: attention forward and backward over the shards of a group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.collectives import Group
from torchtitan_cp.attention.kernels import Alibi, Kernel, Scores
from torchtitan_cp.attention.plan import KeyRows, Plan


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
        slopes: `[Hq]` of linear biases, or None.
    """

    plan: Plan
    kernel: Kernel
    scores: Scores
    key_heads: int
    ring_group: Group
    all_to_all_group: Group
    slopes: Tensor | None = None

    def scores_for(self, keys: KeyRows, heads: slice = slice(None)) -> Scores:
        """The scores of this rank's queries, of some heads, and these keys: with the linear biases of their rows."""
        if self.slopes is None:
            return self.scores
        layout, slopes = self.plan.ring_layout, self.slopes[heads]
        queries = layout.positions(self.ring_group.rank)
        positions = [queries[:0], *(layout.positions(source)[start:stop] for source, start, stop in keys)]
        alibi = Alibi(slopes, queries.to(slopes.device), torch.cat(positions).to(slopes.device))
        return self.scores._replace(alibi=alibi)


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


@dataclass(frozen=True)
class Strategy:
    """Attention across a group of several ranks; alone, a rank runs the ring's.

    Attributes:
        forward: (q, k, v, sinks, call) -> (out, lse, residuals); q `[B, S/P, Hq, Dqk]`,
            k `[B, S/P, Hkv, Dqk]`, v `[B, S/P, Hkv, Dv]`, sinks `[Hq]` or None, out `[B, S/P, Hq, Dv]` in q's
            dtype, lse `[B, S/P, Hq]`.
        backward: (dout, residuals, sinks, call) -> (dq, dk, dv, dsinks), the first three in the inputs'
            dtypes, dsinks `[Hq]` of this rank's rows in their accumulation dtype; None without sinks.
        trades_heads: whether the ranks of an all-to-all group trade heads for sequence.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Call], tuple[Tensor, Tensor, Residuals]]
    backward: Callable[[Tensor, Residuals, Tensor | None, Call], tuple[Tensor, Tensor, Tensor, Tensor | None]]
    trades_heads: bool = False
