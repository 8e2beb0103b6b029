"""What a causal language model of transformers does with tokens, seen by running it at full size without its weights.

Products with large weights, which keep tokens apart, are replaced by a copy of channels, and experts by nothing. All
else runs with numbers on a few tokens, with an attention that returns its own values. So a run of some of the tokens
must equal the run of all of them, and where it does not, a module mixes tokens behind attention's back.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

# Keywords of an attention function that ours takes, and those that change nothing. Any other must be None.
TAKEN_KEYWORDS = ("dropout", "scaling", "sliding_window", "softcap", "s_aux", "plans")
HARMLESS_KEYWORDS = ("position_ids", "use_cache", "output_attentions", "output_router_logits", "is_causal")

_NAME = "torchtitan_cp_look"
_TOKENS = 29  # primes, to tell this dim from all others
_SHARD = (*range(6), *range(22, _TOKENS))  # 13 tokens, as a rank's two chunks
_LARGE = 2**18  # values; parameters that are larger have no numbers
_SHIFT = 100_003  # what is added to positions that the model counts by itself
_MASK_ROWS = (2**20 - 1, 700_001, 300_007)  # queries whose keys are asked for


@dataclass(frozen=True)
class LayerLook:
    """One decoder layer.

    Attributes:
        name: of its module, "model.layers.3"; attention: of the module that calls the attention function, and its class.
        n_heads, n_kv_heads: Hq, Hkv; qk_dim: of q and k; v_dim: of v.
        scale: that multiplies the scores.
        window: keys that a query sees, itself included; 0: all.
        softcap: of the scores; 0: none.
        sinks: each head has a logit that adds no value.
        rotary: name of the buffer with its frequencies; "": not rotated; "fixed": rotated by none that can be set.
        parameters: all of the layer.
        matrices: values of its matrices.
        token_matrices: of these, those that a token meets; of its experts, the share that it is sent to.
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
        logit_scale, logit_softcap: what is done to the output layer's product: a factor, then a soft cap (0: none).
        parameters: all, tied ones once.
        passes_keywords: `plans=` handed to the model reaches every call of the attention function.
        learned_positions: positions change more than q and k.
        scale_follows_rope: YaRN in the config would change the scale of attention.
        rotaries: buffer of frequencies -> dims that it rotates.
        routers: names of modules whose output is router logits.
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
        ValueError: it cannot be trained under context parallelism as it is; the message names layer and class.
    """
    config = _named(config)
    with _registered():
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config).train()
        except Exception as error:
            raise ValueError(f"transformers cannot build a {type(config).__name__}: {error}") from error
        return _Probe(model).look()


def _named(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy whose attention and experts are recorded."""
    config = copy.deepcopy(config)
    config._attn_implementation = config._experts_implementation = _NAME
    config.use_cache, config.dtype = False, torch.float32
    return config


@dataclass
class _Call:
    """A call of the attention function."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    keywords: dict[str, Any]


@dataclass
class _Trace:
    """A run of the model.

    Attributes:
        calls: of the attention function.
        seen: module -> [tokens], a number for each token of its first output.
    """

    calls: list[_Call]
    seen: dict[str, Tensor]
    logits: Tensor
    experts: dict[nn.Module, int]


_current: _Trace


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
) -> tuple[Tensor, None]:
    _current.calls.append(_Call(module, query, key, value, attention_mask, keywords))
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


def _experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    _current.experts[module] = top_k_index.shape[-1]
    return hidden * top_k_weights.sum(-1, keepdim=True)


def _mask(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> Tensor:
    """A mask that knows the window of its function, -1 if it is not one."""
    zero, windows = torch.tensor(0), set()
    for row in _MASK_ROWS:
        keys = torch.arange(row + 64)
        allowed = torch.as_tensor(mask_function(zero, zero, torch.tensor(row), keys)).expand(len(keys))
        seen = int(allowed.sum())
        in_band = bool(allowed[row + 1 - seen : row + 1].all())
        windows.add((seen if seen <= row else 0) if in_band and seen else -1)
    mask = torch.zeros(1, 1, _TOKENS, _TOKENS)
    mask.window = windows.pop() if len(windows) == 1 else -1  # type: ignore[attr-defined]
    return mask


@contextmanager
def _registered() -> Iterator[None]:
    """Attention and experts are ours."""
    attention, experts = (interface._global_mapping for interface in (ALL_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS))
    with patch.dict(attention, {_NAME: _attention}), patch.dict(experts, {_NAME: _experts}):
        yield


class _Weightless(TorchFunctionMode):
    """Products with weights on meta copy channels. Positions that the model counts are shifted."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "arange" and self.shift and args[-1:] == (len(_SHARD),):
            return func(*args, **kwargs) + self.shift
        if name in ("linear", "matmul", "__matmul__", "bmm") and args[1].is_meta and not args[0].is_meta:
            return _copy_channels(args[0], args[1].shape[0 if name == "linear" else -1])
        if name == "addmm" and args[2].is_meta:  # GPT-2's Conv1D
            return _copy_channels(args[1], args[2].shape[-1])
        if name == "embedding" and args[1].is_meta:
            return torch.sin((args[0][..., None] + 1.0) * (torch.arange(args[1].shape[-1]) + 1.0))
        return func(*args, **kwargs)


def _copy_channels(x: Tensor, out: int) -> Tensor:
    return x[..., _channels(x.shape[-1], out)]


@lru_cache(maxsize=256)
def _channels(into: int, out: int) -> Tensor:
    return torch.arange(out) * 7919 % into


class _Probe:
    """A model with numbers where they are few."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.output = model.get_output_embeddings()
        self.embeddings = model.get_input_embeddings()
        self.tied = self.output is not None and self.output.weight is self.embeddings.weight
        self.layers = self._find_layers()
        self.parameters = sum(p.numel() for p in model.parameters())
        self._check_modules()
        self.routers = self._routers()
        self._materialize()

    def name(self, module: nn.Module) -> str:
        return f"{self.names[module]} ({type(module).__name__})"

    def _find_layers(self) -> list[nn.Module]:
        count = self.model.config.num_hidden_layers
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return list(module)
        raise ValueError(f"{type(self.model).__name__} has no list of {count} layers")

    def _check_modules(self) -> None:
        if self.output is None:
            raise ValueError(f"{type(self.model).__name__} has no output layer")
        if self.output.bias is not None:
            raise ValueError(f"{self.name(self.output)} has a bias, which the loss here has not")
        for module in self.model.modules():
            if isinstance(module, nn.Conv1d):
                raise ValueError(f"{self.name(module)} mixes tokens: a convolution")
            if isinstance(module, nn.Dropout) and module.p > 0:
                raise ValueError(f"{self.name(module)} drops {module.p} of its input: set it to 0 with model.overrides")
            for key, value in vars(module).items():
                if (
                    ("dropout" in key or "jitter" in key or "layerdrop" in key)
                    and isinstance(value, float)
                    and value > 0
                ):
                    raise ValueError(f"{self.name(module)} has {key} = {value}: set it to 0 with model.overrides")

    def _materialize(self) -> None:
        generator = torch.Generator().manual_seed(0)
        owners = {
            m: owner for owner in self.model.modules() if isinstance(owner, PreTrainedModel) for m in owner.modules()
        }
        for module in self.model.modules():
            own = False
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name], own = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu"), True
            if own:
                owners[module]._init_weights(module)
            for name, p in module._parameters.items():
                if p is not None and p.numel() <= _LARGE:
                    values = torch.rand(p.shape, generator=generator, device="cpu") + 0.5
                    module._parameters[name] = nn.Parameter(values, requires_grad=False)
            if hasattr(module, "rope_type"):
                kinds = module.rope_type
                module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
        self.output.forward = self._ramp

    def _ramp(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        ramp = torch.linspace(-1, 1, self.output.weight.shape[0], dtype=torch.float64) ** 3 * 1e6
        return ramp.expand(*hidden.shape[:-1], -1)

    @torch.no_grad()
    def run(self, tokens: Tensor, positions: Tensor, masks: bool = False, shift: int = 0) -> _Trace:
        global _current
        _current = trace = _Trace([], {}, torch.empty(0), {})
        count = len(tokens)

        def hook(module: nn.Module, _: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple | list) and out else out
            name = self.names.get(module)
            if (
                name
                and isinstance(out, Tensor)
                and name not in trace.seen
                and (seen := _by_token(out, count)) is not None
            ):
                trace.seen[name] = seen

        mapping = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
        handle = register_module_forward_hook(hook)
        try:
            with patch.dict(mapping, {_NAME: _mask} if masks else {}), _Weightless(shift):
                out = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plans=trace)
            trace.logits = out.logits
        finally:
            handle.remove()
        return trace

    def look(self) -> Look:
        tokens = torch.randint(self.output.weight.shape[0], (_TOKENS,), generator=torch.Generator().manual_seed(1))
        positions, shard = torch.arange(_TOKENS), torch.tensor(_SHARD)
        whole = self.run(tokens, positions, masks=True)
        part = self.run(tokens[shard], positions[shard], shift=_SHIFT)
        self._check_mixing(whole, part)
        moved = self.run(tokens, 2 * positions + 1)
        rotaries = self._rotaries(tokens, positions, whole, moved)
        by_layer = self._by_layer(whole)
        masks = self._by_layer(part)
        layers = tuple(
            self._layer(layer, call, masks[layer], whole, rotaries.get(self.names[layer], ""))
            for layer, call in by_layer.items()
        )
        scale, softcap = self._logits(whole.logits[0, 0])
        buffers = {name: layer for layer, name in rotaries.items() if name != "fixed"}
        return Look(
            model_class=type(self.model).__name__,
            layers=layers,
            embeddings=self.names[self.embeddings],
            output=self.names[self.output],
            tie_embeddings=self.tied,
            dim=self.hidden.shape[-1],
            vocab_size=self.output.weight.shape[0],
            parameters=self.parameters,
            logit_scale=scale,
            logit_softcap=softcap,
            passes_keywords=all(call.keywords.get("plans") is whole for call in whole.calls),
            learned_positions=not _equal(whole.calls[0].v, moved.calls[0].v),
            scale_follows_rope=self._scale_follows_rope(),
            rotaries={name: 2 * self.model.get_buffer(name).numel() for name in buffers},
            routers=self.routers,
        )

    def _routers(self) -> tuple[str, ...]:
        recorded = getattr(self.model, "_can_record_outputs", None) or {}
        for module in self.model.modules():
            recorded = recorded or getattr(module, "_can_record_outputs", None) or {}
        found = recorded.get("router_logits") or []
        found = found if isinstance(found, list | tuple) else [found]
        kinds = tuple(getattr(kind, "target_class", kind) for kind in found)
        return tuple(name for module, name in self.names.items() if isinstance(module, kinds))

    def _scale_follows_rope(self) -> bool:
        config = _named(self.model.config)
        rope = getattr(config, "rope_parameters", None)
        if not rope:
            return False
        yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "mscale_all_dim": 0.7}
        for kinds in [rope] if "rope_theta" in rope else [kind for kind in rope.values() if kind]:
            kinds.update(yarn)
        with torch.device("meta"):
            other = type(self.model)(config)
        pairs = zip(self.model.modules(), other.modules(), strict=True)
        return any(getattr(one, "scaling", None) != getattr(two, "scaling", None) for one, two in pairs)

    def _by_layer(self, trace: _Trace) -> dict[nn.Module, _Call]:
        found = {}
        for layer in self.layers:
            inside = set(layer.modules())
            calls = [call for call in trace.calls if call.module in inside]
            if len(calls) != 1:
                times = (
                    f"calls the attention function {len(calls)} times"
                    if calls
                    else "never calls the attention function"
                )
                raise ValueError(f"{self.name(layer)} {times}, and must do so once")
            found[layer] = calls[0]
        return found

    def _check_mixing(self, whole: _Trace, part: _Trace) -> None:
        for name, seen in whole.seen.items():
            if name in part.seen and not _equal(seen[list(_SHARD)], part.seen[name]):
                raise ValueError(f"{name} ({type(self.model.get_submodule(name)).__name__}) mixes tokens")
        for one, two in zip(whole.calls, part.calls, strict=True):
            for which in ("q", "k", "v"):
                if not _equal(getattr(one, which)[:, :, list(_SHARD)], getattr(two, which)):
                    raise ValueError(f"{self.name(one.module)}: {which} of a token depends on other tokens")

    def _rotaries(self, tokens: Tensor, positions: Tensor, whole: _Trace, moved: _Trace) -> dict[str, str]:
        """Layer -> buffer of frequencies."""
        found = {
            name: "fixed"
            for (name, one), two in zip(self._named_calls(whole), moved.calls, strict=True)
            if not _equal(one.k, two.k)
        }
        buffers = [
            n for n, b in self.model.named_buffers() if n.endswith("inv_freq") and not n.endswith("original_inv_freq")
        ]
        groups: dict[str, list[str]] = {}
        for buffer in buffers:
            layer = next((self.names[layer] for layer in self.layers if buffer.startswith(self.names[layer] + ".")), "")
            groups.setdefault(buffer.removeprefix(layer), []).append(buffer)
        for group in groups.values():
            for buffer in group:
                self.model.get_buffer(buffer).mul_(1.5)
            turned = self.run(tokens, positions)
            for buffer in group:
                self.model.get_buffer(buffer).div_(1.5)
            for (name, one), two in zip(self._named_calls(whole), turned.calls, strict=True):
                if not _equal(one.k, two.k):
                    found[name] = next((buffer for buffer in group if buffer.startswith(name + ".")), group[0])
        return found

    def _named_calls(self, trace: _Trace) -> list[tuple[str, _Call]]:
        return [(self.names[layer], call) for layer, call in self._by_layer(trace).items()]

    def _layer(self, layer: nn.Module, call: _Call, bare: _Call, trace: _Trace, rotary: str) -> LayerLook:
        name, keywords = self.name(call.module), call.keywords
        for key, value in keywords.items():
            if key not in (*TAKEN_KEYWORDS, *HARMLESS_KEYWORDS) and value is not None:
                raise ValueError(f"{name} hands {key} to the attention function, which knows no such thing")
        if bare.mask is not None:
            raise ValueError(f"{name} makes a mask of its own")
        if keywords.get("dropout"):
            raise ValueError(f"{name} drops {keywords['dropout']} of its scores: set it to 0 with model.overrides")
        window = keywords.get("sliding_window") or 0
        true_window = getattr(call.mask, "window", -2)
        if true_window != window:
            raise ValueError(f"{name} has a mask of window {true_window} and sliding_window = {window}")
        sinks = keywords.get("s_aux")
        if sinks is not None and sinks.dim() != 1:
            raise ValueError(f"{name} has sinks of shape {list(sinks.shape)}, not one a head")
        scale = keywords.get("scaling")
        if isinstance(scale, Tensor):
            raise ValueError(f"{name} scales its scores by a tensor")
        for x in (call.k, call.v):
            if x.shape[2] != _TOKENS:
                raise ValueError(f"{name} has {x.shape[2]} keys for {_TOKENS} tokens")
        parameters, matrices, used, per_token = self._count(layer, trace)
        in_attention = self._count(call.module, trace)[2]
        return LayerLook(
            name=self.names[layer],
            attention=self.names[call.module],
            attention_class=type(call.module).__name__,
            n_heads=call.q.shape[1],
            n_kv_heads=call.k.shape[1],
            qk_dim=call.q.shape[3],
            v_dim=call.v.shape[3],
            scale=call.q.shape[3] ** -0.5 if scale is None else float(scale),
            window=window,
            softcap=float(keywords.get("softcap") or 0.0),
            sinks=sinks is not None,
            rotary=rotary,
            parameters=parameters,
            matrices=matrices,
            token_matrices=used,
            token_mlp_matrices=used - in_attention,
            experts_per_token=per_token,
        )

    def _count(self, layer: nn.Module, trace: _Trace) -> tuple[int, int, int, int]:
        parameters = matrices = used = per_token = 0
        for module in layer.modules():
            chosen = trace.experts.get(module, 0)
            per_token = max(per_token, chosen)
            for name, p in module.named_parameters(recurse=False):
                parameters += p.numel()
                if p.dim() > 1 and "bias" not in name and not isinstance(module, nn.Embedding):
                    matrices += p.numel()
                    used += p.numel() * chosen // p.shape[0] if chosen else p.numel()
        return parameters, matrices, used, per_token

    def _logits(self, logits: Tensor) -> tuple[float, float]:
        ramp = torch.linspace(-1, 1, self.output.weight.shape[0], dtype=torch.float64) ** 3 * 1e6
        name = type(self.model).__name__
        if logits.shape != ramp.shape:
            raise ValueError(f"{name} makes {list(logits.shape)} logits of {list(ramp.shape)}")
        logits = logits.double()
        middle = int(torch.where(ramp > 0, ramp, math.inf).argmin())
        cap = float(logits[-1]) if abs(float(logits[-1])) < 1e4 else 0.0
        scale = float(logits[middle] / ramp[middle])
        if cap:
            scale = cap * math.atanh(scale * float(ramp[middle]) / cap) / float(ramp[middle])
        expected = cap * torch.tanh(scale * ramp / cap) if cap else scale * ramp
        if not torch.allclose(logits, expected, rtol=1e-5, atol=1e-6):
            raise ValueError(f"{name} transforms its logits by more than a factor and a soft cap")
        return scale, cap


def _by_token(x: Tensor, tokens: int) -> Tensor | None:
    """A number for each token, [tokens], from a tensor that has a dim for tokens."""
    if tokens not in x.shape or not x.is_floating_point():
        return None
    rows = x.movedim(list(x.shape).index(tokens), 0).flatten(1).float()
    return rows @ torch.cos(torch.arange(rows.shape[1]) + 1.0)


def _equal(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(
        one, two, rtol=1e-3, atol=1e-3 * float(one.abs().max()), equal_nan=True
    )
