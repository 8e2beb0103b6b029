"""Workarounds for limits of torch.compile, and of autograd inside operators."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

# The dispatch keys that are included and excluded by default, read here while modules are imported.
_DEFAULT_KEYS = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
P = ParamSpec("P")
Result = TypeVar("Result")
Class = TypeVar("Class", bound=type)
_MODES = DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.PythonTLSSnapshot)


def with_autograd() -> AbstractContextManager[object]:
    """A context in which autograd and vmap work, which torch.library disables in its operators; modes stay active."""
    include, exclude = _DEFAULT_KEYS
    return torch._C._ForceDispatchKeyGuard(include | (torch._C._dispatch_tls_local_include_set() & _MODES), exclude)


def compile_whole(function: Callable[P, Result]) -> Callable[P, Result]:
    """Compile a function as one graph, and again for each new kind of call.

    By default torch stops after eight kinds. A block with three windows, in training and evaluation, at a fixed and at
    a dynamic length, has twelve; flex_attention reaches eight with two numbers of sequences, forward and backward.
    """
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
    return torch.compile(function, fullgraph=True)


def compile_rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function of tensors `[rows, ..]` once for any number of rows, which may differ from call to call.

    torch would make code of its own for 0 rows and for 1: these run uncompiled.
    """
    compiled = compile_whole(function)

    def run(*tensors: Tensor) -> Tensor:
        if len(tensors[0]) < 2:
            return function(*tensors)
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(*tensors)

    return run


@cache
def compile_on_cuda(function: Callable[P, Result], on_cuda: bool) -> Callable[P, Result]:
    """A function of an operator, compiled on CUDA, where each operation alone would move several times the bytes."""
    if not on_cuda:
        return function
    compiled = compile_whole(function)

    def run(*arguments: P.args, **named: P.kwargs) -> Result:
        with with_autograd(), torch.no_grad():
            return compiled(*arguments, **named)

    return run


def guard_only_read_fields(cls: Class) -> Class:
    """Make torch.compile guard only those fields of a frozen dataclass that a graph reads.

    torch 2.11 reads every field of a frozen dataclass that passes through activation checkpointing: a plan with other
    document lengths would recompile a block. Setting a field still fails.
    """
    cls.__dataclass_params__.frozen = False  # type: ignore[attr-defined]
    return cls
