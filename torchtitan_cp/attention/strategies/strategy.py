"""The interface of an exchange: attention forward and backward over the shards of a group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.collectives import Group
from torchtitan_cp.attention.kernels import Alibi, Kernel
from torchtitan_cp.attention.mask import Span
from torchtitan_cp.attention.plan import Plan, RingStep

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
        all_to_all_group: the ranks that trade heads for sequence.
        slopes: `[Hq]` of linear biases, or None.
    """

    plan: Plan
    kernel: Kernel
    scale: float
    key_heads: int
    ring: Group
    all_to_all_group: Group
    slopes: Tensor | None = None

    def kernel_for(self, step: RingStep | None, heads: slice = ALL_HEADS) -> Kernel:
        """The kernel for a step's keys, or for the keys of the full sequence, with the linear biases of their rows.

        Args:
            heads: the query heads at hand.
        """
        if self.slopes is None:
            return self.kernel
        assert self.kernel.biased
        plan, slopes = self.plan, self.slopes[heads]
        queries = plan.ring_layout.positions(plan.rank // plan.all_to_all_ranks)
        if step is None:
            keys = torch.arange(plan.sequence_length)
        else:
            keys = rows_in(plan.ring_layout.positions(step.source).unsqueeze(0), step.receive)[0]
        return self.kernel.biased(Alibi(slopes, queries.to(slopes.device), keys.to(slopes.device)))


def rows_in(x: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """The rows of spans, one after the other: `[B, S/P, ..] -> [B, rows, ..]`."""
    parts = [x[:, start:stop] for start, stop in spans] or [x[:, :0]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


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
    """Attention across a group.

    Attributes:
        forward: (q, k, v, sinks, call) -> (out, lse, residuals); q `[B, S/P, Hq, Dqk]`,
            k `[B, S/P, Hkv, Dqk]`, v `[B, S/P, Hkv, Dv]`, sinks `[Hq]` or None, out `[B, S/P, Hq, Dv]` in q's
            dtype, lse `[B, S/P, Hq]`.
        backward: (dout, residuals, sinks, call) -> (dq, dk, dv, dsinks), the first three in the inputs'
            dtypes, dsinks `[Hq]` of this rank's rows in their accumulation dtype; None without sinks.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Call], tuple[Tensor, Tensor, Residuals]]
    backward: Callable[[Tensor, Residuals, Tensor | None, Call], tuple[Tensor, Tensor, Tensor, Tensor | None]]
