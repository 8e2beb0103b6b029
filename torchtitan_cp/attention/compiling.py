"""torch.compile for blocks and kernels; the only place that handles its limits."""

from collections.abc import Callable
from typing import Any

import torch


def compile_whole(function: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
    """Compile a function as one graph, and again for each new kind of call.

    torch stops compiling after eight kinds: a block with three windows, in training and evaluation, at a fixed and at
    any length, has twelve; flex_attention reaches eight with two numbers of sequences, forward and backward.

    Args:
        mode: torch.compile's.
    """
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
    return torch.compile(function, fullgraph=True, mode=mode)
