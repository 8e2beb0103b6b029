"""One observed forward of a causal language model of transformers, at full size but without its large weights.

The model runs on a few tokens. Products with large weights are replaced by a copy of channels, which keeps tokens
apart, experts by the identity, and attention by a function that returns its values; everything else computes with real
numbers. So a run on some of the tokens must give the numbers that the run on all of them gives. Where it does not, a
module mixes tokens outside attention. Likewise, convolutions return their input, and recurrences their values.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from models.huggingface.attention import attention, registered
from models.huggingface.linear import LinearFunctions, redirect

# Of the functions of an observed run, apart from training's: exports observe one in a thread while training goes on.
NAME = "torchtitan_cp_observed"
TOKENS = 29
_MASK_QUERIES = (2**20 - 1, 700_001, 300_007)  # positions at which a mask is evaluated
_MASK_OFFSET = 2.0**23  # marks the masks made here; added to a window, it leaves the window exact in fp32
_NO_WINDOW = -1
DELTA_RULE, KIMI_RULE, SCAN = "gated delta rule", "Kimi delta rule", "Mamba-2 scan"  # names of recurrences

AttentionInterface.register(NAME, attention)  # or no model could be built with it

# The module that calls attention, or a convolution or recurrence; and its fields of a LayerInfo or LinearInfo.
Call = tuple[nn.Module, dict[str, Any]]


class RefusedError(ValueError):
    """The model cannot be trained with its sequences split over ranks."""


class ObservedRun(TorchFunctionMode):
    """One forward of a model, observed.

    Args:
        names: module -> name.
        masks: let the model ask for masks and compare their windows with those that it passes to attention; otherwise
            it gets none, as in training.
        shift: added to positions that the model counts by itself.

    Attributes:
        calls: of attention, in the order in which they were made.
        linear_calls: of convolutions and recurrences, likewise.
        weighted: modules with parameters that are all their own, in the order in which they ran.
        fingerprints: what a module returns or passes to attention -> a number for each token, `[tokens]`.
        experts_per_token: module that holds experts -> experts that a token is sent to.
        logits: `[V]`, fp64.
    """

    plans = None  # the attention function reads it

    def __init__(self, names: Mapping[nn.Module, str], masks: bool = False, shift: int = 0) -> None:
        super().__init__()
        self.names, self.masks, self.shift = names, masks, shift
        self.calls: list[Call] = []
        self.linear_calls: list[Call] = []
        self.weighted: list[nn.Module] = []
        self.fingerprints: dict[str, Tensor] = {}
        self.experts_per_token: dict[nn.Module, int] = {}
        self._running: list[nn.Module] = []

    @torch.no_grad()
    def forward(self, model: nn.Module, tokens: Tensor, positions: Tensor) -> "ObservedRun":
        """Run the model once, and return this."""
        self.tokens = len(tokens)
        redirect(model, LinearFunctions(self, self))  # type: ignore[arg-type]
        with ExitStack() as hooks:
            for module in model.modules():
                hooks.enter_context(module.register_forward_pre_hook(self._before_module))
                hooks.enter_context(module.register_forward_hook(self._after_module))
            output = self._run(model, tokens, positions)
        self.logits = output.logits.double().flatten()
        return self

    def _run(self, model: nn.Module, tokens: Tensor, positions: Tensor) -> Any:
        """Call the model, which has the hooks."""
        with (
            registered(AttentionInterface, NAME, self._attention),
            registered(ExpertsInterface, NAME, self._run_experts),
            registered(AttentionMaskInterface, NAME, _window_mask) if self.masks else nullcontext(),
            _RandomOperators(lambda: self._refuse(self._running[-1], "is random: set its dropout or jitter to 0")),
            self,
        ):
            try:
                return model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plans=self)
            except RefusedError:
                raise
            except Exception as error:
                module = self._running[-1] if self._running else model
                reason = f"does not run on {self.tokens} tokens and their positions: {type(error).__name__}: {error}"
                raise self._refuse(module, reason) from error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        args = tuple(_off_meta(value) for value in args)
        kwargs = {key: _off_meta(value) for key, value in (kwargs or {}).items()}
        if name == "arange" and self.shift and args[-1:] == (self.tokens,):
            return func(*args, **kwargs) + self.shift
        if name == "embedding" and args[1].is_meta:
            return torch.sin((args[0][..., None] + 1.0) * (torch.arange(args[1].shape[-1]) + 1.0))
        if name in ("linear", "matmul", "__matmul__", "bmm", "addmm"):
            x, weight = args[1:3] if name == "addmm" else args[:2]
            if weight.is_meta and not x.is_meta:
                return _copy_channels(x, weight.shape[0 if name == "linear" else -1])
        return func(*args, **kwargs)

    def _refuse(self, module: nn.Module, reason: str) -> RefusedError:
        return RefusedError(f"{label(module, self.names)} {reason}")

    def _attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **options: Any
    ) -> Any:
        """The registered function. It calls ours, which refuses what it does not support."""
        window = options.get("sliding_window") or 0
        without_mask = 0 if self.masks else window
        mask_window = without_mask if attention_mask is None else _window_of(attention_mask)
        if mask_window != window:
            kind = {_NO_WINDOW: "not a window", 0: "causal only"}.get(mask_window, f"a window of {mask_window}")
            raise self._refuse(module, f"has a mask that is {kind}, and hands attention sliding_window = {window}")
        not_causal = False in (options.get("is_causal"), getattr(module, "is_causal", None))
        if not_causal or isinstance(options.get("scaling"), Tensor):
            raise self._refuse(module, "is not causal, or has a scale for each token")
        if {k.shape[2], v.shape[2]} != {self.tokens}:
            raise self._refuse(module, "has keys that are not one a token")
        module.attend, module.shared = partial(self._attend, module), self  # type: ignore[assignment]
        try:
            return attention(module, q, k, v, None, **options)
        except ValueError as error:  # its message begins with the class
            raise self._refuse(module, str(error).partition(" ")[2]) from error

    def _attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _: Any, window: int, **options: Any
    ) -> Tensor:
        """Record the call, and return values in place of attention: `[1, tokens, Hq, Dv]`."""
        for which, x in {"q": q, "k": k, "v": v}.items():
            self._add_fingerprint(f"{which} of {label(module, self.names)}", x)
        sizes = {"n_heads": q.shape[2], "n_kv_heads": k.shape[2], "qk_dim": q.shape[3], "v_dim": v.shape[3]}
        scale, softcap = float(options["scale"] or q.shape[3] ** -0.5), float(options["softcap"])
        fields = {**sizes, "scale": scale, "softcap": softcap, "sinks": "sinks" in options, "window": window}
        self.calls.append((module, fields))
        return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)

    def causal_conv(
        self, x: Tensor, weight: Tensor, _: Any, *, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        """Record a convolution, and return its input."""
        self._add_linear_call({"conv_channels": weight.shape[0], "conv_width": weight.shape[1]}, x=x)
        return x

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, _: Any, *, qk_l2norm: bool
    ) -> Tensor:
        """Record a delta rule, and return its values."""
        self._add_recurrence(DELTA_RULE if g.ndim == 3 else KIMI_RULE, k, v, q=q, k=k, v=v, g=g, beta=beta)
        return v

    def selective_scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, _: Any) -> Tensor:
        """Record a scan of Mamba-2, and return its input."""
        self._add_recurrence(SCAN, B, x, x=x, dt=dt, B=B, C=C)
        return x

    def _add_recurrence(self, rule: str, keys: Tensor, values: Tensor, **inputs: Tensor) -> None:
        (key_heads, key_dim), (value_heads, value_dim) = keys.shape[2:], values.shape[2:]
        sizes = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
        self._add_linear_call({"rule": rule, **sizes}, **inputs)

    def _add_linear_call(self, fields: dict[str, Any], **inputs: Tensor) -> None:
        module = self._running[-1]
        for which, x in inputs.items():
            if x.shape[1] != self.tokens:
                raise self._refuse(module, "has a convolution or recurrence whose steps are not one a token")
            self._add_fingerprint(f"{which} of {label(module, self.names)}", x)
        self.linear_calls.append((module, fields))

    def _run_experts(self, module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The registered function of experts."""
        self.experts_per_token[module] = chosen.shape[-1]
        return hidden * weights.sum(-1, keepdim=True)

    def _add_fingerprint(self, name: str, x: Any) -> None:
        """Reduce a tensor that has a dim of tokens to a number for each token."""
        if isinstance(x, Tensor) and x.is_floating_point() and self.tokens in x.shape and name not in self.fingerprints:
            rows = x.movedim(x.shape.index(self.tokens), 0).flatten(1).float()
            self.fingerprints[name] = rows @ torch.cos(torch.arange(rows.shape[1]) + 1.0)

    def _before_module(self, module: nn.Module, inputs: Any) -> None:
        if self._running and inputs and not any(module.children()):
            # Its parent computes it.
            self._add_fingerprint(f"{label(self._running[-1], self.names)}, to {self.names.get(module)}", inputs[0])
        self._running.append(module)

    def _after_module(self, module: nn.Module, _: Any, output: Any) -> None:
        self._running.pop()
        if sum(1 for _ in module.parameters(recurse=False)) == sum(1 for _ in module.parameters()) > 0:
            self.weighted.append(module)
        first = output[0] if isinstance(output, tuple | list) and output else output
        self._add_fingerprint(label(module, self.names), first)

    def differences(self, other: "ObservedRun", tokens: Any = slice(None)) -> list[str]:
        """Names of what has other fingerprints in another run, of these tokens, in the order of this run."""
        both = {name: (x[tokens], other.fingerprints.get(name)) for name, x in self.fingerprints.items()}
        return [name for name, (x, y) in both.items() if y is not None and not nearly_equal(x, y)]


class _RandomOperators(TorchDispatchMode):
    """Raises an error where random numbers are drawn, in this thread."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):  # operators of higher order have none
            raise self.error()
        return func(*args, **(kwargs or {}))


def label(module: nn.Module, names: Mapping[nn.Module, str]) -> str:
    """The module's name and class, for messages."""
    return f"{names.get(module, '')} ({type(module).__name__})".lstrip()


def _off_meta(value: Any) -> Any:
    """The value; the CPU for the meta device, on which a model would make tensors like its weights."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def nearly_equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors differ by rounding alone. NaN is equal to nothing."""
    return bool((x - y).abs().max() <= 1e-3 * x.abs().max() + 1e-6)


def _copy_channels(x: Tensor, channels: int) -> Tensor:
    """`[..., in]` -> `[..., channels]`, by leaving channels out and repeating the rest."""
    x = x[..., :: max(1, x.shape[-1] // channels)]
    return torch.cat([x] * -(-channels // x.shape[-1]), dim=-1)[..., :channels].contiguous()


def _window_mask(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> Tensor:
    """The registered function of masks. Its masks are filled with their window, which `_window_of` reads."""
    windows = {_window_at(query, mask_function) for query in _MASK_QUERIES}
    window = windows.pop() if len(windows) == 1 else _NO_WINDOW
    return torch.full((1, 1, TOKENS, TOKENS), _MASK_OFFSET + window)


def _window_at(query: int, mask_function: Callable[..., Tensor]) -> int:
    """How many keys a query sees, itself included; 0: all up to itself; _NO_WINDOW: not the most recent ones."""
    keys, zero = torch.arange(query + 64), torch.tensor(0)
    allowed = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(len(keys))
    seen = int(allowed.sum())
    if seen == 0 or not allowed[query + 1 - seen : query + 1].all():
        return _NO_WINDOW
    return seen if seen <= query else 0


def _window_of(mask: Tensor) -> int:
    """The window of a mask that `_window_mask` made, or of a slice of it."""
    window = int(mask.flatten()[0].double() - _MASK_OFFSET)
    return window if window >= 0 and bool((mask == _MASK_OFFSET + window).all()) else _NO_WINDOW
