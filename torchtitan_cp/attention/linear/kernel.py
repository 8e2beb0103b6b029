"""One rank's part of the rule in torch, some heads at a time, and the choice of flash-linear-attention's instead.

Both kernels have the same four methods: what a segment does to the state that enters it, the outputs, and backward what
a segment asks of that state, and the gradients.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torchtitan_cp.attention.compiling import above_autograd
from torchtitan_cp.attention.linear import chunks, flash_linear
from torchtitan_cp.attention.linear.chunks import Factors, Inputs
from torchtitan_cp.attention.linear.rows import Stretch, chunk_rows
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.plan import Plan

PART = 2**25  # values, [tokens, heads, V], that a kernel works on at a time; its working memory is about 20 times that


class TorchKernel:
    """Chunks in torch.

    Args:
        inputs: rows `[B, S/P, H, ..]`.
        dout: `[B, S/P, Hv, V]`, for a backward.
    """

    def __init__(self, inputs: Inputs, plan: Plan, scale: float, rule: str, dout: Tensor | None) -> None:
        self.rows, self.rule, key_heads = chunk_rows(plan, inputs.q.device), rule, inputs.q.shape[2]
        dtype = accumulation_dtype(inputs.q.dtype)
        q, k, v, g, beta = (self.rows.split(x.to(dtype), key_heads) for x in inputs)
        begins = self.rows.begins.unflatten(1, (-1, chunks.CHUNK)).transpose(0, 1)[:, :, None, None, :, None]
        self.leaves = Inputs(q, k, v, g.masked_fill(begins, float("-inf")), beta)
        with above_autograd(), torch.set_grad_enabled(dout is not None):
            if dout is not None:
                self.dout = self.rows.split(dout.to(dtype), key_heads)
                self.leaves = Inputs(*(x.requires_grad_() for x in self.leaves))
            self.made = chunks.make_factors(self.leaves, scale, rule)
        self.factors = Factors(*(x.detach() for x in self.made))

    def summarize(self, segment: Stretch, transition: bool) -> Tensor:
        """A and B side by side, or B alone, `[b, H, K, columns]`."""
        return chunks.summarize(self._of(segment), transition, self.rule).flatten(1, 2)

    def outputs(self, entering: Tensor) -> Tensor:
        """`[B, S/P, Hv, V]` of the states that enter the runs, `[runs, B, H, K, V]`."""
        states = chunks.chunk_states(self.factors, dict(zip(self.rows.firsts, entering, strict=False)))
        return self.rows.join(chunks.chunk_outputs(self.factors, states))

    def gradient_inside(self, segment: Stretch) -> Tensor:
        """G, what a segment's own outputs ask of the state that enters it, `[b, H, K, V]`."""
        dout = self.dout[self.rows.chunks_of(segment), segment.rows]
        return chunks.chunk_gradients(self._of(segment), dout, {})[1].flatten(1, 2)

    def gradients(self, entering: Tensor, leaving: Tensor) -> list[Tensor]:
        """The gradients of the inputs.

        Args:
            entering: states that enter the runs; leaving: gradients of those that leave them, `[runs, B, H, K, V]`.
        """
        states = chunks.chunk_states(self.factors, dict(zip(self.rows.firsts, entering, strict=False)))
        dstates, _ = chunks.chunk_gradients(self.factors, self.dout, dict(zip(self.rows.lasts, leaving, strict=False)))
        dfactors = chunks.factor_gradients(self.factors, states, self.dout, dstates)
        with above_autograd():
            return [self.rows.join(x) for x in torch.autograd.grad(self.made, self.leaves, dfactors)]

    def _of(self, segment: Stretch) -> Factors:
        return Factors(*(x[self.rows.chunks_of(segment), segment.rows] for x in self.factors))


Kernel = TorchKernel | flash_linear.FlashKernel


def kernels(
    inputs: Inputs, plan: Plan, scale: float, rule: str, dout: Tensor | None = None
) -> tuple[list[int], Callable[[int], Kernel]]:
    """(the value heads of each part, a function that makes a part's kernel and keeps the last one)."""
    key_heads, copies = inputs.q.shape[2], inputs.v.shape[2] // inputs.q.shape[2]
    fused = rule != "scan" and flash_linear.is_available(inputs, plan)
    cls: type[Kernel] = flash_linear.FlashKernel if fused else TorchKernel
    size = key_heads if fused else max(1, PART * key_heads // max(1, inputs.v.numel()))
    keys, values = ([min(size, key_heads - start) * n for start in range(0, key_heads, size)] for n in (1, copies))
    parts = [x.split(keys if n < 2 else values, 2) for n, x in enumerate(inputs)]
    douts = [None] * len(keys) if dout is None else dout.split(values, 2)

    kept: dict[int, Kernel] = {}

    def make(part: int) -> Kernel:
        if part not in kept:
            kept.clear()
            kept[part] = cls(Inputs(*(x[part] for x in parts)), plan, scale, rule, douts[part])
        return kept[part]

    return values, make
