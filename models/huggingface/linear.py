"""Convolutions and recurrences of transformers' layers, computed by the model's `attend` across documents and ranks.

transformers computes them by a few functions, which are globals of each modeling file. None is replaced there: a module
whose code calls one gets a copy of that code with other globals. So each model has its own functions, whatever else
runs in the process.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from models.architecture import Attend
from models.huggingface.attention import HARMLESS

Function = Callable[..., Any]
FUSED = "mamba2_split_conv1d_scan_combined"  # if it returns None, the layer calls the separate functions
NAMES = frozenset(
    ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan", FUSED)
)
_HARMLESS = HARMLESS | {"position_embeddings"}


def redirect(model: nn.Module, make: Callable[[str, Function], Function]) -> None:
    """Let the modules of a model call other functions in place of those in NAMES.

    Args:
        make: (name, transformers' own function) -> the function to call.
    """
    copies: dict[Function, Function] = {}  # one for all layers of a class: torch.compile guards their identity
    for module in model.modules():
        for name, method in _callers(type(module)):  # type: ignore[arg-type]
            if method not in copies:
                scope = method.__globals__
                others = {called: make(called, scope[called]) for called in NAMES & {*method.__code__.co_names}}
                copies[method] = _with_globals(method, {**scope, **others})
            setattr(module, name, MethodType(copies[method], module))


@lru_cache(maxsize=1024)
def _callers(kind: type) -> list[tuple[str, FunctionType]]:
    """The methods of a class whose code calls functions in NAMES, without their decorators."""
    methods = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    plain = {name: inspect.unwrap(value) for name, value in methods.items() if inspect.isfunction(value)}
    return [(name, f) for name, f in plain.items() if NAMES & {*f.__code__.co_names} & f.__globals__.keys()]


def _with_globals(function: FunctionType, scope: dict[str, Any]) -> FunctionType:
    """A copy of a function that looks its globals up in `scope`."""
    scope.pop("__name__")  # torch.compile would look them up in the module of this name
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class LinearFunctions:
    """Functions with the arguments and results of transformers', which call `attend`.

    Args:
        attend: of the model; shared: has `plans`, for families that drop unknown keywords.
    """

    def __init__(self, attend: Attend, shared: Any) -> None:
        self.attend, self.shared = attend, shared

    def __call__(self, name: str, _: Function) -> Function:
        """The function that replaces the one of this name; see `redirect`."""
        if name == FUSED:
            return _not_fused
        if name == "causal_conv1d_fn":
            return self.convolve
        return self.scan if name == "mamba2_chunk_scan" else self.delta_rule

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        plans: Any = None,
        **others: Any,
    ) -> Tensor:
        """A causal depthwise convolution; hidden states `[B, C, S/cp]`, weight `[C, W]`."""
        _refuse("causal_conv1d_fn", others)
        fused = "silu" if activation in ("silu", "swish") else None
        x = hidden_states.transpose(1, 2)
        out = self.attend.causal_conv(x, weight, self._plans(plans), bias=bias, activation=fused)
        return (out if fused or activation is None else ACT2FN[activation](out)).transpose(1, 2)

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 0,
        use_qk_l2norm_in_kernel: bool = False,
        plans: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """The gated delta rule, or Kimi's; shapes as of `Attend.gated_delta_rule`. Returns (output, no state)."""
        _refuse("a delta rule", others)
        plans = self._plans(plans)
        out = self.attend.gated_delta_rule(query, key, value, g, beta, plans, qk_l2norm=use_qk_l2norm_in_kernel)
        return out, None

    def scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        plans: Any = None,
        **others: Any,
    ) -> Tensor:
        """The scan of Mamba-2; shapes as of `Attend.selective_scan`, D and dt_bias `[H]`. Step sizes are in fp32."""
        _refuse("mamba2_chunk_scan", others)
        x, dtype = hidden_states, torch.promote_types(dt.dtype, torch.float32)
        dt = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        out = self.attend.selective_scan(x, dt, A, B, C, self._plans(plans))
        return out if D is None else (out.to(dtype) + D.to(dtype)[:, None] * x.to(dtype)).to(x.dtype)

    def _plans(self, plans: Any) -> Any:
        return self.shared.plans if plans is None else plans


def _not_fused(*_: Any, **__: Any) -> None:
    """None: each part is computed by a function of its own."""


def _refuse(name: str, others: dict[str, Any]) -> None:
    """Raise ValueError if a keyword would be ignored: a state to begin with or to return, or documents."""
    given = [key for key, value in others.items() if value is not None and value is not False]
    if unsupported := [key for key in given if key not in _HARMLESS]:
        raise ValueError(f"{name} is called with {', '.join(unsupported)}, which is not supported")


def native_functions(documents: Tensor) -> Callable[[str, Function], Function]:
    """Transformers' own functions, called for each document by itself; for `redirect`.

    Args:
        documents: the number of each token's document, `[B, S]`, or `[1, S]` for all rows.
    """
    return lambda name, original: _not_fused if name == FUSED else partial(_by_document, name, original, documents)


def _by_document(name: str, original: Function, documents: Tensor, *inputs: Any, **named: Any) -> Any:
    """Call a function with the tokens of each document, and join what it returns.

    Tokens are the last dim of what a convolution takes, `[B, C, S]`, and the second one of all other tensors that have
    more than two.
    """
    dim, length = (2 if name == "causal_conv1d_fn" else 1), documents.shape[1]

    def cut(value: Any, row: int, start: int, stop: int) -> Any:
        has_tokens = isinstance(value, Tensor) and value.ndim > 2 and value.shape[dim] == length
        return value[row : row + 1].narrow(dim, start, stop - start) if has_tokens else value

    rows = []
    for row, numbers in enumerate(documents.expand(len(inputs[0]), -1)):
        parts = []
        for start, stop in _spans(numbers):
            span = (row, start, stop)
            keywords = {key: cut(value, *span) for key, value in named.items()}
            out = original(*(cut(value, *span) for value in inputs), **keywords)
            parts.append(out[0] if isinstance(out, tuple) else out)
        rows.append(torch.cat(parts, dim))
    out = torch.cat(rows)
    return (out, None) if "delta" in name else out


def _spans(numbers: Tensor) -> Iterator[tuple[int, int]]:
    """Where each run of equal numbers begins and ends."""
    start = 0
    for length in torch.unique_consecutive(numbers, return_counts=True)[1].tolist():
        yield start, start + length
        start += length
