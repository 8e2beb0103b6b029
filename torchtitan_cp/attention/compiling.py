"""torch.compile for blocks and kernels, and autograd inside operators, with workarounds for their limits."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey, DispatchKeySet

# The dispatch keys that are included and excluded by default, as they are while modules are imported.
_DEFAULT_KEYS = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
Class = TypeVar("Class", bound=type)
_MODES = DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.PythonTLSSnapshot)


def with_autograd() -> Any:
    """A context in which autograd and vmap work, which torch.library switches off in its operators; modes stay."""
    include, exclude = _DEFAULT_KEYS
    return torch._C._ForceDispatchKeyGuard(include | (torch._C._dispatch_tls_local_include_set() & _MODES), exclude)


def compile_whole(function: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
    """Compile a function as one graph, and again for each new kind of call.

    torch stops compiling after eight kinds: a block with three windows, in training and evaluation, at a fixed and at
    any length, has twelve; flex_attention reaches eight with two numbers of sequences, forward and backward.

    Args:
        mode: torch.compile's.
    """
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
    return torch.compile(function, fullgraph=True, mode=mode)


def guarded_by_use(cls: Class) -> Class:
    """Mark a frozen dataclass so that torch.compile guards only the fields that a graph reads.

    torch 2.11 reads every field of a frozen one that goes through activation checkpointing, so that a plan whose
    documents have other lengths compiled a block anew. Setting a field still fails.
    """
    cls.__dataclass_params__.frozen = False  # type: ignore[attr-defined]
    return cls
