"""torch.compile as blocks and kernels here want it; the one place that knows its limits."""

from collections.abc import Callable
from typing import Any

import torch


def compile_whole(function: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
    """Compile a function whole or not at all, for as many kinds of calls as come.

    torch gives up after eight kinds: a block with three windows, in training and evaluation, at a fixed length and at
    any, has twelve; flex_attention reaches eight with two numbers of sequences at once, forward and backward.

    Args:
        mode: torch.compile's.
    """
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
    return torch.compile(function, fullgraph=True, mode=mode)
