"""What a causal language model of transformers does with tokens, seen by running it at full size without its weights.

Products with large weights, which keep tokens apart, are replaced by a copy of channels, and experts by nothing. All
else runs with numbers on a few tokens, with an attention that returns its own values. So a run on some of the tokens
must equal the run on all of them; where it does not, a module mixes tokens behind attention's back.
"""

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from models.huggingface.attention import HARMLESS
from models.huggingface.init import Initializer

# What this attention takes; of other keywords each must be harmless or None.
TAKEN = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "plans"}

_NAME = "torchtitan_cp_look"
_TOKENS, _SHARD = 29, [*range(6), *range(22, 29)]  # 13 of them: primes, which no other dim is
_LARGE = 2**18  # values: a larger parameter has no numbers
_SHIFT = 100_003  # added to positions that the model counts by itself
_QUERIES = (2**20 - 1, 700_001, 300_007)  # whose keys a mask is asked for
FIXED = "fixed"


@dataclass(frozen=True)
class LayerLook:
    """One decoder layer.

    Attributes:
        name: of its module, "model.layers.3".
        attention: name of the module that calls the attention function; attention_class: its class.
        n_heads, n_kv_heads: Hq, Hkv; qk_dim: of q and k; v_dim: of v.
        scale: that multiplies the scores.
        window: keys that a query sees, itself included; 0: all.
        softcap: of the scores; 0: none.
        sinks: each head has a logit that adds no value.
        rotary: name of the buffer with its frequencies; "": positions do not change its keys; FIXED: they do, by
            frequencies that are no buffer.
        parameters: all of the layer; matrices: values of those that have two or more dims.
        token_matrices: of these, those that a token meets: of experts, the share that it is sent to.
        token_mlp_matrices: of these, those outside attention.
        experts_per_token: experts that a token is sent to; 0: none.
    """

    name: str
    attention: str
    attention_class: str
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
    token_matrices: int
    token_mlp_matrices: int
    experts_per_token: int


@dataclass(frozen=True)
class Look:
    """A model.

    Attributes:
        embeddings, output: names of the input embedding and of the output layer.
        parameters: all, tied ones once.
        logit_scale, logit_softcap: what is done to the output layer's product: a factor, then a soft cap (0: none).
        passes_keywords: `plans=` handed to the model reaches every call of the attention function.
        learned_positions: positions change more than q and k.
        scale_follows_rope: YaRN in the config changes the scale of attention.
        rotaries: buffer of frequencies -> dims of a head that they turn.
        routers: names of modules whose output holds router logits.
    """

    model_class: str
    layers: tuple[LayerLook, ...]
    embeddings: str
    output: str
    tie_embeddings: bool
    dim: int
    vocab_size: int
    parameters: int
    logit_scale: float
    logit_softcap: float
    passes_keywords: bool
    learned_positions: bool
    scale_follows_rope: bool
    rotaries: Mapping[str, int]
    routers: tuple[str, ...]


def look_at(config: PreTrainedConfig) -> Look:
    """Look at the model of a config.

    Raises:
        ValueError: it cannot be trained with its sequences cut over ranks; the message names layer and class.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = config._experts_implementation = _NAME
    config.use_cache, config.dtype = False, torch.float32
    with _registered(AttentionInterface), _registered(ExpertsInterface):
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config).train()
        except Exception as error:
            what = "its attention cannot be replaced" if str(error) == repr(_NAME) else error
            raise ValueError(f"transformers cannot build the model of this {type(config).__name__}: {what}") from error
        return _Probe(model).look()


def _registered(interface: Any, function: Any = None) -> Any:
    """A context in which an interface of transformers has a function of ours."""
    return patch.dict(interface._global_mapping, {_NAME: function})


@dataclass
class _Call:
    """Of the attention function; shapes as it gets them, `[B, H, S, D]`."""

    module: nn.Module
    q: torch.Size
    k: torch.Size
    v: torch.Size
    window: int
    keywords: dict[str, Any]


class _Run(TorchFunctionMode):
    """A run of a model.

    Attributes:
        calls: of the attention function.
        seen: module, or what it hands to attention -> a number for each token, `[tokens]`.
        experts: module -> experts of a token.
        active: modules that are running.
    """

    def __init__(self, name: Callable[[nn.Module], str], tokens: int, shift: int = 0) -> None:
        super().__init__()
        self.name, self.tokens, self.shift = name, tokens, shift
        self.calls: list[_Call] = []
        self.seen: dict[str, Tensor] = {}
        self.experts: dict[nn.Module, int] = {}
        self.active: list[nn.Module] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "arange" and self.shift and args[-1:] == (self.tokens,):
            return func(*args, **kwargs) + self.shift
        if name in ("linear", "matmul", "__matmul__", "bmm") and args[1].is_meta and not args[0].is_meta:
            return _copy_channels(args[0], args[1].shape[0 if name == "linear" else -1])
        if name == "addmm" and args[2].is_meta:  # of GPT-2
            return _copy_channels(args[1], args[2].shape[-1])
        if name == "embedding" and args[1].is_meta:
            return torch.sin((args[0][..., None] + 1.0) * (torch.arange(args[1].shape[-1]) + 1.0))
        return func(*args, **kwargs)

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **keywords: Any
    ) -> Any:
        """The registered function."""
        for which, x in {"q": q, "k": k, "v": v}.items():
            self.see(f"{which} of {self.name(module)}", x)
        window = 0 if attention_mask is None else getattr(attention_mask, "window", -1)
        self.calls.append(_Call(module, q.shape, k.shape, v.shape, window, keywords))
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2).contiguous(), None

    def run_experts(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The registered function of experts."""
        self.experts[module] = index.shape[-1]
        return hidden * weights.sum(-1, keepdim=True)

    def see(self, name: str, x: Any) -> None:
        """Keep a number for each token of a tensor that has a dim for them."""
        if isinstance(x, Tensor) and x.is_floating_point() and self.tokens in x.shape and name not in self.seen:
            rows = x.movedim(x.shape.index(self.tokens), 0).flatten(1).float()
            self.seen[name] = rows @ torch.cos(torch.arange(rows.shape[1]) + 1.0)

    def leave(self, module: nn.Module, _: Any, out: Any) -> None:
        """Called after each module."""
        self.active.pop()
        self.see(self.name(module), out[0] if isinstance(out, tuple | list) and out else out)

    def differences(self, other: "_Run", tokens: Any = slice(None)) -> list[str]:
        """What has other numbers for these tokens in another run, in the order of this run."""
        both = {name: (x[tokens], other.seen[name]) for name, x in self.seen.items() if name in other.seen}
        return [name for name, (x, y) in both.items() if not (x - y).abs().max() <= 1e-3 * x.abs().max() + 1e-6]


def _copy_channels(x: Tensor, out: int) -> Tensor:
    return x[..., _channels(x.shape[-1], out)]


@lru_cache(maxsize=256)
def _channels(into: int, out: int) -> Tensor:
    return torch.arange(out) * 7919 % into


def _mask(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> Tensor:
    """The registered function of masks: one that knows its window, -1 if that is not what it is."""
    windows, zero = set(), torch.tensor(0)
    for query in _QUERIES:
        keys = torch.arange(query + 64)
        allowed = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(len(keys))
        seen = int(allowed.sum())
        windows.add((seen if seen <= query else 0) if allowed[query + 1 - seen : query + 1].all() else -1)
    mask = torch.zeros(1, 1, _TOKENS, _TOKENS)
    mask.window = windows.pop() if len(windows) == 1 else -1  # type: ignore[attr-defined]
    return mask


class _Probe:
    """A model with numbers where they are few, and what it does with tokens."""

    def __init__(self, model: Any) -> None:
        self.model, self.names = model, {module: name for name, module in model.named_modules()}
        self.output, self.embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        count = getattr(model.config, "num_hidden_layers", 0)
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if self.output is None or not lists:
            raise ValueError(f"{type(model).__name__} has no output layer, or no list of {count} layers")
        self.layers, self.vocab_size = list(lists[0]), self.output.weight.shape[0]
        self.tied = self.output.weight is self.embeddings.weight
        self.parameters = sum(p.numel() for p in model.parameters())
        self.routers = self._routers()
        self.ramp = torch.linspace(-1, 1, self.vocab_size, dtype=torch.float64) ** 3 * 1e6
        self._check_modules()
        self._fill()

    def name(self, module: nn.Module) -> str:
        """As messages have it."""
        return f"{self.names.get(module, '')} ({type(module).__name__})".lstrip()

    def _check_modules(self) -> None:
        if self.output.bias is not None:
            raise ValueError(f"{self.name(self.output)} has a bias, which the loss here does not add")
        for module in self.model.modules():
            if isinstance(module, nn.Conv1d):
                raise ValueError(f"{self.name(module)} mixes tokens: it is a convolution")
            random = {"p": module.p} if isinstance(module, nn.Dropout) else vars(module)
            for key, value in random.items():
                if (key == "p" or "drop" in key or "jitter" in key) and isinstance(value, float) and value > 0:
                    raise ValueError(f"{self.name(module)} is random, {key} = {value}: set it to 0 in model.overrides")

    def _routers(self) -> tuple[str, ...]:
        recorded = [getattr(m, "_can_record_outputs", None) or {} for m in self.model.modules()]
        found = next((one["router_logits"] for one in recorded if "router_logits" in one), [])
        kinds = [getattr(one, "target_class", one) for one in (found if isinstance(found, list | tuple) else [found])]
        return tuple(name for module, name in self.names.items() if isinstance(module, tuple(kinds)))

    def _fill(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for module in self.model.modules():
            for name, p in module._parameters.items():
                if p is not None and p.numel() <= _LARGE:
                    values = torch.rand(p.shape, generator=generator, device="cpu") + 0.5
                    module._parameters[name] = nn.Parameter(values, requires_grad=False)
            if kinds := getattr(module, "rope_type", None):  # others choose frequencies by the positions of a run
                module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
        for name, buffer in Initializer(self.model.config).buffers(torch.device("cpu")).items():
            owner, _, leaf = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[leaf] = buffer.nan_to_num(0.5)
        self.output.forward = self._make_ramp

    def _make_ramp(self, hidden: Tensor) -> Tensor:
        self.dim = hidden.shape[-1]
        return self.ramp[None, None]

    @torch.no_grad()
    def run(self, tokens: Tensor, positions: Tensor, masks: bool = False, shift: int = 0) -> _Run:
        """Run the model; without `masks` it must do as in training, where it makes none."""
        run = _Run(self.name, len(tokens), shift)
        hooks = (
            register_module_forward_pre_hook(lambda module, _: run.active.append(module)),
            register_module_forward_hook(run.leave),
        )
        masked = _registered(AttentionMaskInterface, _mask) if masks else nullcontext()
        ours = _registered(AttentionInterface, run.attention), _registered(ExpertsInterface, run.run_experts)
        try:
            with ours[0], ours[1], masked, run:
                out = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plans=run)
        except Exception as error:
            which = "a shard's tokens" if shift else "tokens and their positions"
            at = self.name(run.active[-1] if run.active else self.model)
            raise ValueError(f"{at} does not run on {which}: {type(error).__name__}: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
        self.logits = out.logits
        return run

    def look(self) -> Look:
        tokens = torch.arange(_TOKENS) * 7919 % self.vocab_size
        positions = torch.arange(_TOKENS)
        whole = self.run(tokens, positions, masks=True)
        scale, softcap = self._logits(self.logits)
        calls = self._calls(whole)
        part = self.run(tokens[_SHARD], positions[_SHARD], shift=_SHIFT)
        for call in part.calls:
            if call.window:
                raise ValueError(f"{self.name(call.module)} makes a mask of its own")
        if mixed := whole.differences(part, _SHARD):
            raise ValueError(f"{mixed[0]} is not the same for a shard's tokens: it mixes them, or counts positions")
        moved = whole.differences(self.run(tokens, 2 * positions + 1))
        rotaries = self._rotaries(tokens, positions, whole, calls, moved)
        return Look(
            model_class=type(self.model).__name__,
            layers=tuple(self._layer(layer, calls[layer], whole, rotaries[layer]) for layer in self.layers),
            embeddings=self.names[self.embeddings],
            output=self.names[self.output],
            tie_embeddings=self.tied,
            dim=self.dim,
            vocab_size=self.vocab_size,
            parameters=self.parameters,
            logit_scale=scale,
            logit_softcap=softcap,
            passes_keywords=all(call.keywords.get("plans") is whole for call in whole.calls),
            learned_positions=any(name.startswith("v of ") for name in moved),
            scale_follows_rope=self._scale_follows_rope(),
            rotaries={n: 2 * self.model.get_buffer(n).numel() for n in {*rotaries.values()} - {"", FIXED}},
            routers=self.routers,
        )

    def _logits(self, logits: Tensor) -> tuple[float, float]:
        """Factor and soft cap that make these logits of the ramp."""
        small, last = int(self.ramp.abs().argmin()), float(logits.flatten()[-1])
        small += self.ramp[small] == 0
        cap = last if last < 1e4 else 0.0
        scale = float(logits.flatten()[small] / self.ramp[small])
        scale = scale if not cap else cap * math.atanh(scale * float(self.ramp[small]) / cap) / float(self.ramp[small])
        expected = cap * torch.tanh(scale * self.ramp / cap) if cap else scale * self.ramp
        if logits.numel() != len(self.ramp) or not torch.allclose(logits.double().flatten(), expected, rtol=1e-5):
            raise ValueError(f"{type(self.model).__name__} does more to its logits than a factor and a soft cap")
        return scale, cap

    def _calls(self, run: _Run) -> dict[nn.Module, _Call]:
        """The one call of each layer, whose keywords and mask are such as we have."""
        found = {}
        for layer in self.layers:
            inside = set(layer.modules())
            calls = [call for call in run.calls if call.module in inside]
            if len(calls) != 1:
                raise ValueError(f"{self.name(layer)} calls the attention function {len(calls)} times, not once")
            call = found[layer] = calls[0]
            name, keywords = self.name(call.module), {k: v for k, v in call.keywords.items() if v is not None}
            if strange := keywords.keys() - TAKEN - HARMLESS:
                raise ValueError(f"{name} hands attention {', '.join(sorted(strange))}, which it has not here")
            if (
                keywords.get("is_causal") is False
                or keywords.get("dropout")
                or isinstance(keywords.get("scaling"), Tensor)
            ):
                raise ValueError(f"{name} is not causal, or has dropout or a scale for each token")
            if call.window != keywords.get("sliding_window", 0):
                mask = {-1: "neither causal nor a window"}.get(call.window, f"a window of {call.window}")
                raise ValueError(
                    f"{name} has a mask that is {mask}, and sliding_window = {keywords.get('sliding_window')}"
                )
            if keywords.get("s_aux", torch.empty(0)).dim() != 1 or {call.k[2], call.v[2]} != {run.tokens}:
                raise ValueError(f"{name} has sinks for each token, or keys that are not one a token")
        return found

    def _rotaries(
        self, tokens: Tensor, positions: Tensor, whole: _Run, calls: dict[nn.Module, _Call], moved: list[str]
    ) -> dict[nn.Module, str]:
        """Layer -> its LayerLook.rotary, from what changes with the positions and with each buffer of frequencies."""
        keys = {layer: f"k of {self.name(call.module)}" for layer, call in calls.items()}
        found = {layer: FIXED if key in moved else "" for layer, key in keys.items()}
        groups: dict[str, list[str]] = {}  # each layer may have its own
        for name, _ in self.model.named_buffers():
            if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
                own = [layer for layer in self.layers if name.startswith(self.names[layer] + ".")]
                groups.setdefault(name.removeprefix(self.names[own[0]]) if own else name, []).append(name)
        for group in groups.values():
            for name in group:
                self.model.get_buffer(name).mul_(1.5)
            turned = whole.differences(self.run(tokens, positions))
            for name in group:
                self.model.get_buffer(name).div_(1.5)
            for layer in (layer for layer, key in keys.items() if key in turned):
                found[layer] = next((n for n in group if n.startswith(self.names[layer] + ".")), group[0])
        return found

    def _scale_follows_rope(self) -> bool:
        config = copy.deepcopy(self.model.config)
        rope = getattr(config, "rope_parameters", None) or {}
        yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "mscale_all_dim": 0.7}
        for values in [rope] if "rope_theta" in rope else filter(None, rope.values()):
            values.update(yarn)
        with torch.device("meta"):
            other = type(self.model)(config)
        pairs = zip(self.model.modules(), other.modules(), strict=True)
        return any(getattr(one, "scaling", None) != getattr(two, "scaling", None) for one, two in pairs)

    def _layer(self, layer: nn.Module, call: _Call, run: _Run, rotary: str) -> LayerLook:
        scale, matrices = call.keywords.get("scaling"), _matrices(layer, run.experts)
        return LayerLook(
            name=self.names[layer],
            attention=self.names[call.module],
            attention_class=type(call.module).__name__,
            n_heads=call.q[1],
            n_kv_heads=call.k[1],
            qk_dim=call.q[3],
            v_dim=call.v[3],
            scale=call.q[3] ** -0.5 if scale is None else float(scale),
            window=call.window,
            softcap=float(call.keywords.get("softcap") or 0.0),
            sinks=call.keywords.get("s_aux") is not None,
            rotary=rotary,
            parameters=sum(p.numel() for p in layer.parameters()),
            matrices=_matrices(layer, {}),
            token_matrices=matrices,
            token_mlp_matrices=matrices - _matrices(call.module, run.experts),
            experts_per_token=max(run.experts.get(module, 0) for module in layer.modules()),
        )


def _matrices(inside: nn.Module, experts: Mapping[nn.Module, int]) -> int:
    """Values of matrices, of these experts' the share of those that a token is sent to."""
    return sum(
        p.numel() * experts.get(module, p.shape[0]) // p.shape[0]
        for module in inside.modules()
        for name, p in module._parameters.items()
        if p is not None and p.dim() > 1 and "bias" not in name and not isinstance(module, nn.Embedding)
    )
