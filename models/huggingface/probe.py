"""Looks at what a causal language model of transformers does with tokens, at full size but without its large weights.

The model runs on a few tokens. Products with large weights are replaced by a copy of channels, which keeps tokens
apart, experts by the identity, and attention by a function that returns its values; everything else computes with real
numbers. So a run on some of the tokens must give the numbers that the run on all of them gives. Where it does not, a
module mixes tokens outside attention.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.moe import ExpertsInterface

from models.huggingface.attention import NAME, attention
from models.huggingface.init import on_meta

_TOKENS = 29
_SHARD = [*range(6), *range(22, 29)]  # 13 of the tokens. Both numbers are primes, so no other dim is equal to them.
_LARGE = 2**18  # larger parameters are left without values
_SHIFT = 100_003  # added to positions that the model counts by itself
_MASK_QUERIES = (2**20 - 1, 700_001, 300_007)  # positions at which a mask is evaluated
_MASK_OFFSET = 2.0**23  # marks the masks made here; added to a window, it leaves the window exact in fp32
_NO_WINDOW = -1
FIXED = "fixed"


@dataclass(frozen=True)
class LayerInfo:
    """One decoder layer.

    Attributes:
        name: of its module, for example "model.layers.3".
        attention: name of the module that calls the attention function.
        n_heads, n_kv_heads: Hq, Hkv.
        qk_dim, v_dim: head dim of queries and keys, and of values.
        scale: multiplies the scores.
        window: keys that a query sees, itself included; 0: all.
        softcap: of the scores; 0: none.
        sinks: each head has a logit that takes part in the softmax and adds no value.
        rotary: name of the buffer that holds its frequencies; "": its keys do not depend on positions; FIXED: they do,
            by frequencies that are not in a buffer.
        parameters: number of all its parameters.
        matrices: number of those in tensors of two or more dims.
        active_matrices: number of those that a token uses; of experts, only the ones that it is sent to.
        active_mlp_matrices: number of those that are outside attention.
        experts: name of the module that holds its experts; "": none.
        n_experts: X, or 0.
        experts_per_token: experts that a token is sent to, or 0.
    """

    name: str
    attention: str
    n_heads: int
    n_kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    window: int
    softcap: float
    sinks: bool
    rotary: str
    parameters: int
    matrices: int
    active_matrices: int
    active_mlp_matrices: int
    experts: str
    n_experts: int
    experts_per_token: int

    @property
    def head_dim(self) -> int:
        """The mean of Dqk and Dv, which determines work and messages."""
        return (self.qk_dim + self.v_dim) // 2


@dataclass(frozen=True)
class ModelProbe:
    """A model.

    Attributes:
        parameters: number of all parameters; tied ones count once.
        logit_scale, logit_softcap: a factor, then a soft cap (0: none), applied to the product of the output layer.
        learned_positions: positions change more than queries and keys.
        longest: rows of its table of learned positions; 0: it has none.
        scale_follows_rope: YaRN in the config changes the scale of attention.
        rotaries: name of a buffer of frequencies -> how many dims of a head it turns.
        routers: names of modules that return router logits.
    """

    model_class: str
    layers: tuple[LayerInfo, ...]
    tie_embeddings: bool
    dim: int
    vocab_size: int
    parameters: int
    logit_scale: float
    logit_softcap: float
    learned_positions: bool
    longest: int
    scale_follows_rope: bool
    rotaries: Mapping[str, int]
    routers: tuple[str, ...]


_Call = tuple[nn.Module, dict[str, Any]]  # the module that calls attention, and its fields of a LayerInfo
_ExpertsPerToken = Mapping[nn.Module, int]  # by the module that holds the experts


class _RefusedError(ValueError):
    """The model cannot be trained with its sequences split over ranks."""


def probe_model(config: PreTrainedConfig) -> ModelProbe:
    """ModelProbe at the model of a config.

    Raises:
        ValueError: it cannot be trained with its sequences split over ranks; the message names layer and class.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small, a second thread waits longer than it works
    try:
        return _Probe(on_meta(config, NAME).train()).probe()
    except _RefusedError:
        raise
    except Exception as error:
        if str(error) == repr(NAME):  # a KeyError: the class looks attention up in a table of its own
            names = {m: name for name, m in on_meta(config).named_modules() if "Attention" in type(m).__name__}
            raise _RefusedError(f"{_label(next(iter(names)), names)} does not let its attention be replaced") from error
        reason = f"{type(error).__name__}: {error}"
        raise _RefusedError(f"the model of this {type(config).__name__} cannot be built: {reason}") from error
    finally:
        torch.set_num_threads(threads)


class _Run(TorchFunctionMode):
    """One forward of a model, observed.

    Args:
        names: module -> name.
        masks: let the model ask for masks and compare their windows with those that it passes to attention; otherwise
            it gets none, as in training.
        shift: added to positions that the model counts by itself.

    Attributes:
        calls: of attention, in the order in which they were made.
        fingerprints: what a module returns or passes to attention -> a number for each token, `[tokens]`.
        experts_per_token: module that holds experts -> experts that a token is sent to.
        logits: `[V]`, fp64.
    """

    plans = None  # the attention function reads it

    def __init__(self, names: Mapping[nn.Module, str], masks: bool = False, shift: int = 0) -> None:
        super().__init__()
        self.names, self.masks, self.shift = names, masks, shift
        self.calls: list[_Call] = []
        self.fingerprints: dict[str, Tensor] = {}
        self.experts_per_token: dict[nn.Module, int] = {}
        self._running: list[nn.Module] = []
        self._random_state = torch.get_rng_state()

    @torch.no_grad()
    def forward(self, model: nn.Module, tokens: Tensor, positions: Tensor) -> "_Run":
        """Run the model once, and return this."""
        self.tokens = len(tokens)
        with (
            _registered(AttentionInterface, self._attention),
            _registered(ExpertsInterface, self._run_experts),
            _registered(AttentionMaskInterface, _window_mask) if self.masks else nullcontext(),
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module),
            self,
        ):
            try:
                output = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plans=self)
            except _RefusedError:
                raise
            except Exception as error:
                module = self._running[-1] if self._running else model
                reason = f"does not run on {self.tokens} tokens and their positions: {type(error).__name__}: {error}"
                raise self._refuse(module, reason) from error
        self.logits = output.logits.double().flatten()
        return self

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

    def _refuse(self, module: nn.Module, reason: str) -> _RefusedError:
        return _RefusedError(f"{_label(module, self.names)} {reason}")

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
            self._add_fingerprint(f"{which} of {_label(module, self.names)}", x)
        sizes = {"n_heads": q.shape[2], "n_kv_heads": k.shape[2], "qk_dim": q.shape[3], "v_dim": v.shape[3]}
        scale, softcap = float(options["scale"] or q.shape[3] ** -0.5), float(options["softcap"])
        fields = {**sizes, "scale": scale, "softcap": softcap, "sinks": "sinks" in options, "window": window}
        self.calls.append((module, fields))
        return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)

    def _run_experts(self, module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The registered function of experts."""
        self.experts_per_token[module] = chosen.shape[-1]
        return hidden * weights.sum(-1, keepdim=True)

    def _add_fingerprint(self, name: str, x: Any) -> None:
        """Reduce a tensor that has a dim of tokens to a number for each token."""
        if isinstance(x, Tensor) and x.is_floating_point() and self.tokens in x.shape and name not in self.fingerprints:
            rows = x.movedim(x.shape.index(self.tokens), 0).flatten(1).float()
            self.fingerprints[name] = rows @ torch.cos(torch.arange(rows.shape[1]) + 1.0)

    def _before_module(self, module: nn.Module, _: Any) -> None:
        self._check_random()
        self._running.append(module)

    def _after_module(self, module: nn.Module, _: Any, output: Any) -> None:
        self._check_random()
        self._running.pop()
        first = output[0] if isinstance(output, tuple | list) and output else output
        self._add_fingerprint(_label(module, self.names), first)

    def _check_random(self) -> None:
        """Refuse a module that has drawn random numbers."""
        if not torch.equal(torch.get_rng_state(), self._random_state):
            raise self._refuse(self._running[-1], "is random: set its dropout or jitter to 0")

    def differences(self, other: "_Run", tokens: Any = slice(None)) -> list[str]:
        """Names of what has other fingerprints in another run, of these tokens, in the order of this run."""
        both = {name: (x[tokens], other.fingerprints.get(name)) for name, x in self.fingerprints.items()}
        return [name for name, (x, y) in both.items() if y is not None and not _nearly_equal(x, y)]


def _label(module: nn.Module, names: Mapping[nn.Module, str]) -> str:
    """The module's name and class, for messages."""
    return f"{names.get(module, '')} ({type(module).__name__})".lstrip()


def _registered(interface: Any, function: Any) -> Any:
    """A context in which an interface of transformers has a function of ours."""
    return patch.dict(interface._global_mapping, {NAME: function})


def _off_meta(value: Any) -> Any:
    """The value; the CPU for the meta device, on which a model would make tensors like its weights."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def _nearly_equal(x: Tensor, y: Tensor) -> bool:
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
    return torch.full((1, 1, _TOKENS, _TOKENS), _MASK_OFFSET + window)


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


class _Probe:
    """A model with values in its small parameters, and what running it reveals."""

    def __init__(self, model: Any) -> None:
        self.model, self.names = model, {module: name for name, module in model.named_modules()}
        self.output = model.get_output_embeddings()
        count = getattr(model.config, "num_hidden_layers", 0)
        # LongCat counts each of its layers twice, so its list of layers is half as long.
        found = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        lists = [list(layers) for layers in found if len(layers) and count % len(layers) == 0 < count]
        if self.output is None or not lists:
            raise _RefusedError(f"{type(model).__name__} has no output layer, or no list of its {count} layers")
        self.layers = max(lists, key=len)
        self.kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * count
        if self.output.bias is not None or type(self.output).forward is not nn.Linear.forward:
            reason = "has a bias" if self.output.bias is not None else "is more than a matrix product"
            raise _RefusedError(f"{_label(self.output, self.names)} {reason}, which the loss here would leave out")
        for layer, kind in zip(self.layers, self.kinds, strict=False):
            if kind not in ("full_attention", "sliding_attention"):
                raise _RefusedError(f"{_label(layer, self.names)} is a layer of {kind}, which is unsupported")
        self.tied = self.output.weight is model.get_input_embeddings().weight
        self.parameters = _count_parameters(model)
        self.frequencies = {n: x for n, x in model.named_buffers() if re.search(r"(?<!original_)inv_freq$", n)}
        self._fill()

    def _fill(self) -> None:
        """Give numbers to small parameters and to buffers, and let the output layer return a ramp."""
        generator = torch.Generator().manual_seed(0)
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.numel() <= _LARGE:
                    values = torch.rand(parameter.shape, generator=generator, device="cpu") + 0.5
                    if parameter.dim() > 1:  # keeps the size of its input, so that rounding stays small
                        values = (values - 1) * (12 / parameter.shape[-1]) ** 0.5
                    module._parameters[name] = nn.Parameter(values, requires_grad=False)
            if kinds := getattr(module, "rope_type", None):  # other types depend on the largest position of a run
                module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
        for buffer in self.model.buffers():
            buffer.nan_to_num_(0.5)
        self.ramp = torch.linspace(-1, 1, self.output.weight.shape[0], dtype=torch.float64) ** 3 * 1e6
        self.ramp[0] = 1e-3
        self.output.forward = lambda hidden: self.ramp[None, None]
        self.model.config._experts_implementation = NAME

    def probe(self) -> ModelProbe:
        """Run the model on all tokens, on a shard, at other positions and with other frequencies, and compare."""
        positions = torch.arange(_TOKENS)
        tokens = positions * 7919 % len(self.ramp)
        whole = _Run(self.names, masks=True).forward(self.model, tokens, positions)
        calls = self._calls_by_layer(whole)
        logit_scale, logit_softcap = self._find_logit_scale_and_softcap(whole.logits)
        shard = _Run(self.names, shift=_SHIFT).forward(self.model, tokens[_SHARD], positions[_SHARD])
        if mixed := whole.differences(shard, _SHARD):
            raise _RefusedError(f"{mixed[0]} differs on a shard: it mixes its tokens, or counts positions")
        moved = whole.differences(_Run(self.names).forward(self.model, tokens, 2 * positions + 1))
        learned = any(name.startswith("v of ") for name in moved)
        for buffer in self.frequencies.values():
            buffer *= 1.5
        turned = whole.differences(_Run(self.names).forward(self.model, tokens, positions))
        rotaries = [self._rotary(*layer, moved, turned) for layer in zip(calls, self.kinds, strict=True)]
        layers = zip(self.layers, calls, rotaries, strict=True)
        return ModelProbe(
            model_class=type(self.model).__name__,
            layers=tuple(self._layer_info(*layer, whole.experts_per_token) for layer in layers),
            tie_embeddings=self.tied,
            dim=self.output.weight.shape[1],
            vocab_size=len(self.ramp),
            parameters=self.parameters,
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
            learned_positions=learned,
            longest=self._table_length() if learned else 0,
            scale_follows_rope=any("mscale" in inspect.getsource(type(module)) for module, _ in calls),
            rotaries={name: 2 * len(buffer) for name, buffer in self.frequencies.items() if name in rotaries},
            routers=self._routers(),
        )

    def _calls_by_layer(self, run: _Run) -> list[_Call]:
        """The call of attention of each layer."""
        found = []
        for layer in self.layers:
            modules = set(layer.modules())
            calls = [call for call in run.calls if call[0] in modules]
            if len(calls) != 1:
                reason = f"calls the attention function {len(calls)} times, where it must do so once"
                raise _RefusedError(f"{_label(layer, self.names)} {reason}")
            found += calls
        return found

    def _find_logit_scale_and_softcap(self, logits: Tensor) -> tuple[float, float]:
        """The factor and soft cap that turn the ramp into the model's logits."""
        scale, last = float(logits[0] / self.ramp[0]), float(logits[-1])
        scale = 1.0 if abs(scale - 1.0) < 1e-6 else scale  # a soft cap rounds it
        cap = last if last < 1e4 else 0.0
        expected = cap * torch.tanh(scale * self.ramp / cap) if cap else scale * self.ramp
        if len(logits) != len(expected) or not torch.allclose(logits, expected, rtol=1e-5):
            raise _RefusedError(f"{type(self.model).__name__} does more to its logits than a factor and a soft cap")
        return scale, cap

    def _rotary(self, call: _Call, kind: str, moved: list[str], turned: list[str]) -> str:
        """LayerInfo.rotary of a layer of this kind, from what changes with positions, and with frequencies."""
        keys = f"k of {_label(call[0], self.names)}"
        if keys not in moved:
            return ""
        of_kind = [name for name in self.frequencies if name.endswith(f".{kind}_inv_freq")]
        return (of_kind or [*self.frequencies, FIXED])[0] if keys in turned else FIXED

    def _layer_info(self, layer: nn.Module, call: _Call, rotary: str, experts_per_token: _ExpertsPerToken) -> LayerInfo:
        module, fields = call
        active = _count_matrices(layer, experts_per_token)
        experts = next((part for part in layer.modules() if part in experts_per_token), None)
        return LayerInfo(
            name=self.names[layer],
            attention=self.names[module],
            **fields,
            rotary=rotary,
            parameters=_count_parameters(layer),
            matrices=_count_matrices(layer, {}),
            active_matrices=active,
            active_mlp_matrices=active - _count_matrices(module, experts_per_token),
            experts=self.names[experts] if experts else "",
            n_experts=len(next(experts.parameters())) if experts else 0,
            experts_per_token=experts_per_token[experts] if experts else 0,
        )

    def _table_length(self) -> int:
        """Rows of the model's table of learned positions. Whisper's config has another name for it."""
        config = self.model.config
        return int(getattr(config, "max_position_embeddings", 0) or getattr(config, "max_target_positions", 0))

    def _routers(self) -> tuple[str, ...]:
        found: Any = self.model.base_model.can_record_outputs.get("router_logits", [])
        kinds: Any = tuple(getattr(one, "target_class", one) for one in (found if isinstance(found, list) else [found]))
        return tuple(name for module, name in self.names.items() if isinstance(module, kinds))


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_matrices(module: nn.Module, experts_per_token: _ExpertsPerToken) -> int:
    """Values in matrices; of these experts' only the share that a token is sent to."""
    return sum(
        parameter.numel() * experts_per_token.get(part, parameter.shape[0]) // parameter.shape[0]
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.dim() > 1 and "bias" not in name and not isinstance(part, nn.Embedding)
    )
