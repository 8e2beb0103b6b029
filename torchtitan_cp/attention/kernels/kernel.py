"""What a kernel is: two functions and a statement of what it can do."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A local attention kernel.

    Attributes:
        forward: (q, k, v, causal, scale) -> (out, lse).
        backward: (dout, q, k, v, out, lse, causal, scale) -> (dq, dk, dv), where out and lse are those of
            the whole row, merged over all its tiles; gradients come in the inputs' dtype.
        refusal: (device type, dtype, Dqk, Dv) -> why it cannot run that, or None.
    """

    forward: Forward
    backward: Backward
    refusal: Callable[[str, torch.dtype, int, int], str | None]
