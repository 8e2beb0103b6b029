"""What a causal language model of transformers does with tokens, seen by running it at full size without its weights.

Products with large weights, which keep tokens apart, are replaced by a copy of channels, and experts by nothing. All
else runs with numbers on a few tokens, with an attention that returns its own values. So a run on some of the tokens
must equal the run on all of them; where it does not, a module mixes tokens behind attention's back.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
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

_TOKENS, _SHARD = 29, [*range(6), *range(22, 29)]  # 13 of them: primes, which no other dim is
_LARGE = 2**18  # values: a larger parameter has no numbers
_SHIFT = 100_003  # added to positions that the model counts by itself
_QUERIES = (2**20 - 1, 700_001, 300_007)  # whose keys a mask is asked for
_MASK = 2.0**23  # beside which a window is seen to be one
_CPU = torch.device("cpu")
FIXED = "fixed"


@dataclass(frozen=True)
class LayerLook:
    """One decoder layer.

    Attributes:
        name: of its module, "model.layers.3".
        attention: name of the module that calls the attention function.
        n_heads, n_kv_heads: Hq, Hkv; qk_dim: of q and k; v_dim: of v.
        scale: that multiplies the scores.
        window: keys that a query sees, itself included; 0: all.
        softcap: of the scores; 0: none.
        sinks: each head has a logit that adds no value.
        rotary: name of the buffer with its frequencies; "": positions do not change its keys; FIXED: they do, by
            frequencies that are no buffer.
        parameters: all of the layer; matrices: values of those that have two or more dims.
        active_matrices: of these, those that a token meets: of experts, the share that it is sent to.
        active_mlp_matrices: of these, those outside attention.
        experts: name of the module with its experts; "": none.
        n_experts: X; experts_per_token: those that a token is sent to; 0: none.
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
        """The mean of Dqk and Dv, on which work and messages depend."""
        return (self.qk_dim + self.v_dim) // 2


@dataclass(frozen=True)
class Look:
    """A model.

    Attributes:
        parameters: all, tied ones once.
        logit_scale, logit_softcap: what is done to the output layer's product: a factor, then a soft cap (0: none).
        learned_positions: positions change more than q and k.
        longest: positions of the smallest table that makes them; 0: any number.
        scale_follows_rope: YaRN in the config changes the scale of attention.
        rotaries: buffer of frequencies -> dims of a head that they turn.
        routers: names of modules whose output holds router logits.
    """

    model_class: str
    layers: tuple[LayerLook, ...]
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


class _Refusal(ValueError):
    """Why a model is refused."""


def look_at(config: PreTrainedConfig) -> Look:
    """Look at the model of a config.

    Raises:
        ValueError: it cannot be trained with its sequences cut over ranks; the message names layer and class.
    """
    try:
        return _Probe(on_meta(config, NAME).train()).look()
    except _Refusal:
        raise
    except Exception as error:
        if str(error) == repr(NAME):
            names = {m: name for name, m in on_meta(config).named_modules() if "Attention" in type(m).__name__}
            raise _Refusal(f"{_name(next(iter(names)), names)} does not let its attention be replaced") from error
        what = f"{type(error).__name__}: {error}"
        raise _Refusal(f"the model of this {type(config).__name__} cannot be built: {what}") from error


def _registered(interface: Any, function: Any) -> Any:
    """A context in which an interface of transformers has a function of ours."""
    return patch.dict(interface._global_mapping, {NAME: function})


class _Run(TorchFunctionMode):
    """A run of a model, while it is entered.

    Args:
        names: module -> name.
        tokens: how many; masks: functions of masks are asked for their windows.
        shift: is added to positions that the model counts by itself.

    Attributes:
        calls: (module, facts for a LayerLook) of each call of the attention function.
        seen: module, or what it hands to attention -> a number for each token, `[tokens]`.
        experts: module -> experts of a token.
        active: modules that are running.
    """

    plans = None  # which attention asks for where a family drops its keyword

    def __init__(self, names: Mapping[nn.Module, str], tokens: int, masks: bool, shift: int) -> None:
        super().__init__()
        self.names, self.tokens, self.masks, self.shift = names, tokens, masks, shift
        self.calls: list[tuple[nn.Module, dict[str, Any]]] = []
        self.seen: dict[str, Tensor] = {}
        self.experts: dict[Any, int] = {}
        self.active: list[nn.Module] = []
        self.random_state = torch.get_rng_state()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        args, kwargs = tuple(map(_off_meta, args)), {key: _off_meta(x) for key, x in kwargs.items()}
        if name == "arange" and self.shift and args[-1:] == (self.tokens,):
            return func(*args, **kwargs) + self.shift
        if name == "embedding" and args[1].is_meta:
            return torch.sin((args[0][..., None] + 1.0) * (torch.arange(args[1].shape[-1]) + 1.0))
        if name in ("linear", "matmul", "__matmul__", "bmm", "addmm"):
            x, weight = args[1:3] if name == "addmm" else args[:2]
            if weight.is_meta and not x.is_meta:
                return _copy_channels(x, weight.shape[0 if name == "linear" else -1])
        return func(*args, **kwargs)

    def attention(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **given: Any) -> Any:
        """The registered function: ours, which refuses what it does not support; its `attend` records the call."""
        name, window = _name(module, self.names), given.get("sliding_window") or 0
        mask = (0 if self.masks else window) if attention_mask is None else _window_of(attention_mask)
        if mask != window:
            what = f"a window of {mask}" if mask > 0 else "not a window" if mask else "causal only"
            raise _Refusal(f"{name} has a mask that is {what}, and hands attention sliding_window = {window}")
        not_causal = False in (given.get("is_causal"), getattr(module, "is_causal", None))
        if not_causal or isinstance(given.get("scaling"), Tensor):
            raise _Refusal(f"{name} is not causal, or has a scale for each token")
        if {k.shape[2], v.shape[2]} != {self.tokens}:
            raise _Refusal(f"{name} has keys that are not one a token")
        module.attend, module.shared = partial(self.attend, module), self  # type: ignore[assignment]
        try:
            return attention(module, q, k, v, None, **given)
        except ValueError as error:
            raise _Refusal(f"{name} {str(error).partition(' ')[2]}") from error

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _: Any, window: int, **options: Any) -> Tensor:
        """Attention that returns its own values, `[1, tokens, H, D]`."""
        for which, x in {"q": q, "k": k, "v": v}.items():
            self.see(f"{which} of {_name(module, self.names)}", x)
        facts = {"n_heads": q.shape[2], "n_kv_heads": k.shape[2], "qk_dim": q.shape[3], "v_dim": v.shape[3]}
        own = {"scale": float(options["scale"] or q.shape[3] ** -0.5), "softcap": float(options["softcap"])}
        self.calls.append((module, {**facts, **own, "sinks": "sinks" in options, "window": window}))
        return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)

    def run_experts(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The registered function of experts."""
        self.experts[module] = index.shape[-1]
        return hidden * weights.sum(-1, keepdim=True)

    def see(self, name: str, x: Any) -> None:
        """Keep a number for each token of a tensor that has a dim for them."""
        if isinstance(x, Tensor) and x.is_floating_point() and self.tokens in x.shape and name not in self.seen:
            rows = x.movedim(x.shape.index(self.tokens), 0).flatten(1).float()
            self.seen[name] = rows @ torch.cos(torch.arange(rows.shape[1]) + 1.0)

    def enter(self, module: nn.Module, _: Any) -> None:
        """Called before each module."""
        self.check_random()
        self.active.append(module)

    def check_random(self) -> None:
        """Refuse a module that has drawn random numbers."""
        if not torch.equal(torch.get_rng_state(), self.random_state):
            raise _Refusal(f"{_name(self.active[-1], self.names)} is random: set its dropout or jitter to 0")

    def leave(self, module: nn.Module, _: Any, out: Any) -> None:
        """Called after each module."""
        self.check_random()
        self.active.pop()
        self.see(_name(module, self.names), out[0] if isinstance(out, tuple | list) and out else out)

    def differences(self, other: "_Run", tokens: Any = slice(None)) -> list[str]:
        """What has other numbers for these tokens in another run, in the order of this run."""
        both = {name: (x[tokens], other.seen[name]) for name, x in self.seen.items() if name in other.seen}
        return [name for name, (x, y) in both.items() if not (x - y).abs().max() <= 1e-3 * x.abs().max() + 1e-6]


def _name(module: nn.Module, names: Mapping[nn.Module, str]) -> str:
    return f"{names.get(module, '')} ({type(module).__name__})".lstrip()


def _off_meta(x: Any) -> Any:
    return _CPU if isinstance(x, torch.device) and x.type == "meta" else x


def _copy_channels(x: Tensor, out: int) -> Tensor:
    """`[..., in]` -> `[..., out]`."""
    x = x[..., :: max(1, x.shape[-1] // out)]
    return torch.cat([x] * -(-out // x.shape[-1]), dim=-1)[..., :out].contiguous()


def _mask(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> Tensor:
    """The registered function of masks: one filled with its window, -1 if that is not what it is."""
    windows, zero = set(), torch.tensor(0)
    for query in _QUERIES:
        keys = torch.arange(query + 64)
        allowed = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(len(keys))
        seen = int(allowed.sum())
        windows.add((seen if seen <= query else 0) if seen and allowed[query + 1 - seen : query + 1].all() else -1)
    return torch.full((1, 1, _TOKENS, _TOKENS), _MASK + (windows.pop() if len(windows) == 1 else -1))


def _window_of(mask: Tensor) -> int:
    """The window of what `_mask` made, or of a slice of it."""
    window = int(mask.flatten()[0].double() - _MASK)
    return window if window >= 0 and bool((mask == _MASK + window).all()) else -1


class _Probe:
    """A model with numbers where they are few, and what it does with tokens."""

    def __init__(self, model: Any) -> None:
        self.model, self.names = model, {module: name for name, module in model.named_modules()}
        self.output = model.get_output_embeddings()
        count = getattr(model.config, "num_hidden_layers", 0)
        # LongCat counts each of its layers twice, so its list of layers has half of that number.
        found = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        lists = [list(layers) for layers in found if len(layers) and count % len(layers) == 0 < count]
        if self.output is None or not lists:
            raise _Refusal(f"{type(model).__name__} has no output layer, or no list of its {count} layers")
        self.layers = max(lists, key=len)
        self.kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * count
        self.tied = self.output.weight is model.get_input_embeddings().weight
        self.parameters = sum(p.numel() for p in model.parameters())
        self.ramp = torch.linspace(-1, 1, self.output.weight.shape[0], dtype=torch.float64) ** 3 * 1e6
        self.ramp[0] = 1e-3
        if self.output.bias is not None or type(self.output).forward is not nn.Linear.forward:
            what = "has a bias" if self.output.bias is not None else "is more than a matrix product"
            raise _Refusal(f"{_name(self.output, self.names)} {what}, which the loss here would leave out")
        for layer, kind in zip(self.layers, self.kinds, strict=False):
            if kind not in ("full_attention", "sliding_attention"):
                raise _Refusal(f"{_name(layer, self.names)} is a layer of {kind}, which is unsupported")
        self._fill()

    def _fill(self) -> None:
        """Give numbers to what is small, and to buffers."""
        generator = torch.Generator().manual_seed(0)
        for module in self.model.modules():
            for name, p in module._parameters.items():
                if p is not None and p.numel() <= _LARGE:
                    values = torch.rand(p.shape, generator=generator, device="cpu") + 0.5
                    if p.dim() > 1:  # keeps the size of its input, so that rounding stays small
                        values = (values - 1) * (12 / p.shape[-1]) ** 0.5
                    module._parameters[name] = nn.Parameter(values, requires_grad=False)
            if kinds := getattr(module, "rope_type", None):  # others choose frequencies by the positions of a run
                module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
        for buffer in self.model.buffers():
            buffer.nan_to_num_(0.5)
        named, not_used = self.model.named_buffers(), "original_inv_freq"
        self.frequencies = {n: x for n, x in named if n.endswith("inv_freq") and not n.endswith(not_used)}
        self.output.forward = self._make_ramp
        self.model.config._experts_implementation = NAME

    def _make_ramp(self, hidden: Tensor) -> Tensor:
        self.dim = hidden.shape[-1]
        return self.ramp[None, None]

    @torch.no_grad()
    def run(self, tokens: Tensor, positions: Tensor, masks: bool = False, shift: int = 0) -> _Run:
        """Run the model; without `masks` as in training, where it is to make none."""
        run = _Run(self.names, len(tokens), masks, shift)
        with ExitStack() as stack:
            # For tensors as small as these a second thread waits longer than it works.
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            stack.enter_context(_registered(AttentionInterface, run.attention))
            stack.enter_context(_registered(ExpertsInterface, run.run_experts))
            stack.enter_context(_registered(AttentionMaskInterface, _mask) if masks else nullcontext())
            stack.callback(register_module_forward_pre_hook(run.enter).remove)
            stack.callback(register_module_forward_hook(run.leave).remove)
            stack.enter_context(run)
            try:
                out = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plans=run)
            except _Refusal:
                raise
            except Exception as error:
                at = _name(run.active[-1] if run.active else self.model, self.names)
                which = "a shard's tokens" if shift else "tokens and their positions"
                raise _Refusal(f"{at} does not run on {which}: {type(error).__name__}: {error}") from error
        self.logits = out.logits.double().flatten()
        return run

    def look(self) -> Look:
        positions = torch.arange(_TOKENS)
        tokens = positions * 7919 % len(self.ramp)
        whole = self.run(tokens, positions, masks=True)
        facts, (scale, softcap) = self._facts(whole), self._logits()
        part = self.run(tokens[_SHARD], positions[_SHARD], shift=_SHIFT)
        if mixed := whole.differences(part, _SHARD):
            raise _Refusal(f"{mixed[0]} differs on a shard: it mixes its tokens, or counts positions")
        moved = whole.differences(self.run(tokens, 2 * positions + 1))
        for buffer in self.frequencies.values():
            buffer *= 1.5
        learned = any(name.startswith("v of ") for name in moved)
        # In some families the first rows are of no position.
        tables = [m for m, name in self.names.items() if isinstance(m, nn.Embedding) and _name(m, self.names) in moved]
        rows = (table.num_embeddings - getattr(table, "offset", 0) for table in tables)
        rotaries = self._rotaries(whole, moved, whole.differences(self.run(tokens, positions)))
        return Look(
            model_class=type(self.model).__name__,
            layers=tuple(LayerLook(**one, rotary=rotary) for one, rotary in zip(facts, rotaries, strict=True)),
            tie_embeddings=self.tied,
            dim=self.dim,
            vocab_size=len(self.ramp),
            parameters=self.parameters,
            logit_scale=scale,
            logit_softcap=softcap,
            learned_positions=learned,
            longest=min(rows, default=0) if learned else 0,
            scale_follows_rope=any("mscale" in inspect.getsource(type(module)) for module, _ in whole.calls),
            rotaries={name: 2 * len(buffer) for name, buffer in self.frequencies.items() if name in rotaries},
            routers=self._routers(),
        )

    def _logits(self) -> tuple[float, float]:
        """Factor and soft cap that make the model's logits of the ramp."""
        scale, last = float(self.logits[0] / self.ramp[0]), float(self.logits[-1])
        scale = 1.0 if abs(scale - 1.0) < 1e-6 else scale  # a soft cap rounds it
        cap = last if last < 1e4 else 0.0
        expected = cap * torch.tanh(scale * self.ramp / cap) if cap else scale * self.ramp
        if len(self.logits) != len(expected) or not torch.allclose(self.logits, expected, rtol=1e-5):
            raise _Refusal(f"{type(self.model).__name__} does more to its logits than a factor and a soft cap")
        return scale, cap

    def _facts(self, run: _Run) -> list[dict[str, Any]]:
        """All but `rotary` of each layer's LayerLook."""
        found = []
        for layer in self.layers:
            inside = set(layer.modules())
            calls = [call for call in run.calls if call[0] in inside]
            if len(calls) != 1:
                name = _name(layer, self.names)
                raise _Refusal(f"{name} calls the attention function {len(calls)} times, where it must do so once")
            module, facts = calls[0]
            used, in_attention = _matrices(layer, run.experts), _matrices(module, run.experts)
            facts |= {"name": self.names[layer], "attention": self.names[module], "matrices": _matrices(layer, {})}
            facts |= {"active_matrices": used, "active_mlp_matrices": used - in_attention}
            facts |= {"parameters": sum(p.numel() for p in layer.parameters())}
            experts = next((one for one in layer.modules() if one in run.experts), None)
            facts |= {"experts": self.names.get(experts, ""), "experts_per_token": run.experts.get(experts, 0)}
            facts |= {"n_experts": len(next(experts.parameters())) if experts else 0}
            found.append(facts)
        return found

    def _rotaries(self, whole: _Run, moved: list[str], turned: list[str]) -> list[str]:
        """LayerLook.rotary of each layer, from what changes with positions, and with frequencies."""
        found = []
        for kind, (module, _) in zip(self.kinds, whole.calls, strict=True):
            key = f"k of {_name(module, self.names)}"
            own = [name for name in self.frequencies if name.endswith(f".{kind}_inv_freq")]
            name = (own or [*self.frequencies, FIXED])[0]
            found.append("" if key not in moved else name if key in turned else FIXED)
        return found

    def _routers(self) -> tuple[str, ...]:
        found: Any = self.model.base_model.can_record_outputs.get("router_logits", [])
        kinds: Any = tuple(getattr(one, "target_class", one) for one in (found if isinstance(found, list) else [found]))
        return tuple(name for module, name in self.names.items() if isinstance(module, kinds))


def _matrices(inside: nn.Module, experts: Mapping[nn.Module, int]) -> int:
    """Values of matrices, of these experts' the share of those that a token is sent to."""
    return sum(
        p.numel() * experts.get(module, p.shape[0]) // p.shape[0]
        for module in inside.modules()
        for name, p in module._parameters.items()
        if p is not None and p.dim() > 1 and "bias" not in name and not isinstance(module, nn.Embedding)
    )
