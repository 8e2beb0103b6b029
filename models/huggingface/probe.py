"""What a causal language model of transformers does with tokens: derived from a few observed runs of it.

`observed_run.py` describes such a run. Runs on all tokens, on some of them, at other positions and with other
frequencies must agree, except where that tells something of the model: windows, rotary embeddings, learned positions.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.huggingface.init import on_meta
from models.huggingface.observed_run import NAME, TOKENS, Call, ObservedRun, RefusedError, label

_SHARD = [*range(6), *range(22, 29)]  # 13 of the tokens. Both numbers are primes, so no other dim is equal to them.
_LARGE = 2**18  # larger parameters are left without values
_SHIFT = 100_003  # added to positions that the model counts by itself
FIXED = "fixed"
KINDS = ("full_attention", "sliding_attention", "linear_attention")  # of attention, in `layer_types`


@dataclass(frozen=True)
class LinearInfo:
    """A convolution of a layer, a recurrence, or the two together.

    Attributes:
        module: name of the one that computes it.
        rule: name of the recurrence; "": a convolution alone.
        key_heads, value_heads, key_dim, value_dim: Hk, Hv, K and V of the recurrence; of Mamba-2, groups, heads, N, D.
        conv_channels, conv_width: C and W of the convolution; 0: none.
    """

    module: str
    rule: str = ""
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    conv_channels: int = 0
    conv_width: int = 0

    @property
    def state_size(self) -> int:
        """Numbers in the state."""
        return self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class LayerInfo:
    """One decoder layer.

    Attributes:
        name: of its module, for example "model.layers.3".
        active_matrices: numbers in tensors of two or more dims that a token uses; of experts, only the ones that it is
            sent to.
        active_mlp_matrices: number of those that are outside attention, convolution and recurrence.
        experts: name of the module that holds its experts; "": none.
        n_experts: X, or 0.
        experts_per_token: experts that a token is sent to, or 0.
        last_product: name of the linear layer that runs last; "": experts or another module with parameters do.
        linear: None: no convolution or recurrence.
        attention: name of the module that calls the attention function; "": none, and what follows is 0.
        n_heads, n_kv_heads: Hq, Hkv.
        qk_dim, v_dim: head dim of queries and keys, and of values.
        scale: multiplies the scores.
        window: keys that a query sees, itself included; 0: all.
        softcap: of the scores; 0: none.
        sinks: each head has a logit that takes part in the softmax and adds no value.
        rotary: name of the buffer that holds its frequencies; "": its keys do not depend on positions; FIXED: they do,
            by frequencies that are not in a buffer.
    """

    name: str
    active_matrices: int
    active_mlp_matrices: int
    experts: str
    n_experts: int
    experts_per_token: int
    last_product: str
    linear: LinearInfo | None
    attention: str = ""
    n_heads: int = 0
    n_kv_heads: int = 0
    qk_dim: int = 0
    v_dim: int = 0
    scale: float = 0.0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    rotary: str = ""


@dataclass(frozen=True)
class ModelProbe:
    """A model.

    Attributes:
        logit_scale, logit_softcap: a factor, then a soft cap (0: none), applied to the product of the output layer.
        learned_positions: positions change more than queries and keys.
        longest: rows of its table of learned positions; 0: it has none.
        scale_follows_rope: YaRN in the config changes the scale of attention.
        rotaries: name of a buffer of frequencies -> how many dims of a head it turns.
        routers: names of modules that return router logits.
        shares_weights: some layers have the same parameters.
    """

    model_class: str
    layers: tuple[LayerInfo, ...]
    tie_embeddings: bool
    dim: int
    vocab_size: int
    logit_scale: float
    logit_softcap: float
    learned_positions: bool
    longest: int
    scale_follows_rope: bool
    rotaries: Mapping[str, int]
    routers: tuple[str, ...]
    shares_weights: bool


_ExpertsPerToken = Mapping[nn.Module, int]  # by the module that holds the experts


def probe_model(config: PreTrainedConfig) -> ModelProbe:
    """Probe the model of a config.

    Raises:
        ValueError: it cannot be trained with its sequences split over ranks; the message names layer and class.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small, a second thread waits longer than it works
    try:
        return _Probe(on_meta(config, NAME).train()).probe()
    except RefusedError:
        raise
    except Exception as error:
        if str(error) == repr(NAME):  # a KeyError: the class looks attention up in a table of its own
            names = {m: name for name, m in on_meta(config).named_modules() if "Attention" in type(m).__name__}
            raise RefusedError(f"{label(next(iter(names)), names)} does not let its attention be replaced") from error
        reason = f"{type(error).__name__}: {error}"
        raise RefusedError(f"the model of this {type(config).__name__} cannot be built: {reason}") from error
    finally:
        torch.set_num_threads(threads)


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
            raise RefusedError(f"{type(model).__name__} has no output layer, or no list of its {count} layers")
        self.layers = max(lists, key=len)
        self.kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * count
        if self.output.bias is not None or type(self.output).forward is not nn.Linear.forward:
            reason = "has a bias" if self.output.bias is not None else "is more than a matrix product"
            raise RefusedError(f"{label(self.output, self.names)} {reason}, which the loss here would leave out")
        for layer, kind in zip(self.layers, self.kinds, strict=False):
            # Compressed or chosen keys would show only on more tokens than a run has.
            if kind.endswith("_attention") and kind not in KINDS:
                raise RefusedError(f"{label(layer, self.names)} is a layer of {kind}, which is unsupported")
        self.tied = self.output.weight is model.get_input_embeddings().weight
        of_layers = [parameter for layer in self.layers for parameter in layer.parameters()]
        self.shares_weights = len(of_layers) > len(set(of_layers))
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
        positions = torch.arange(TOKENS)
        tokens = positions * 7919 % len(self.ramp)
        whole = ObservedRun(self.names, masks=True).forward(self.model, tokens, positions)
        calls = [self._attention_call(layer, whole) for layer in self.layers]
        linear = [self._linear_info(layer, whole) for layer in self.layers]
        if not any(calls):
            first = label(self.layers[0], self.names)
            raise RefusedError(f"{first} does not call the attention function, as at least one layer must")
        logit_scale, logit_softcap = self._find_logit_scale_and_softcap(whole.logits)
        shard = ObservedRun(self.names, shift=_SHIFT).forward(self.model, tokens[_SHARD], positions[_SHARD])
        if mixed := whole.differences(shard, _SHARD):
            where = mixed[0].partition(", to ")[0]
            raise RefusedError(f"{where} gives other numbers on a shard: it mixes its tokens, or counts positions")
        moved = whole.differences(ObservedRun(self.names).forward(self.model, tokens, 2 * positions + 1))
        learned = any(name.startswith("v of ") for name in moved)
        for buffer in self.frequencies.values():
            buffer *= 1.5
        turned = whole.differences(ObservedRun(self.names).forward(self.model, tokens, positions))
        rotaries = [self._rotary(*layer, moved, turned) for layer in zip(calls, self.kinds, strict=True)]
        layers = zip(self.layers, calls, rotaries, linear, strict=True)
        return ModelProbe(
            model_class=type(self.model).__name__,
            layers=tuple(self._layer_info(*layer, whole) for layer in layers),
            tie_embeddings=self.tied,
            dim=self.output.weight.shape[1],
            vocab_size=len(self.ramp),
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
            learned_positions=learned,
            longest=self._table_length() if learned else 0,
            scale_follows_rope=any("mscale" in inspect.getsource(type(module)) for module, _ in whole.calls),
            rotaries={name: 2 * len(buffer) for name, buffer in self.frequencies.items() if name in rotaries},
            routers=self._routers(),
            shares_weights=self.shares_weights,
        )

    def _attention_call(self, layer: nn.Module, run: ObservedRun) -> Call | None:
        """A layer's call of attention."""
        calls = _calls_within(layer, run.calls)
        if len(calls) > 1:
            reason = f"calls the attention function {len(calls)} times, where it may do so once"
            raise RefusedError(f"{label(layer, self.names)} {reason}")
        return calls[0] if calls else None

    def _linear_info(self, layer: nn.Module, run: ObservedRun) -> LinearInfo | None:
        """A layer's convolution and recurrence, which must be the one before the other in a module of their own."""
        calls = _calls_within(layer, run.linear_calls)
        keys = [key for _, fields in calls for key in fields]
        if len({module for module, _ in calls}) > 1 or len(keys) > len({*keys}) or layer in dict(calls):
            raise RefusedError(f"{label(layer, self.names)} has more than one convolution or recurrence")
        fields = {key: value for _, fields in calls for key, value in fields.items()}
        return LinearInfo(module=self.names[calls[0][0]], **fields) if calls else None

    def _find_logit_scale_and_softcap(self, logits: Tensor) -> tuple[float, float]:
        """The factor and soft cap that turn the ramp into the model's logits."""
        scale, last = float(logits[0] / self.ramp[0]), float(logits[-1])
        scale = 1.0 if abs(scale - 1.0) < 1e-6 else scale  # a soft cap rounds it
        cap = last if last < 1e4 else 0.0
        expected = cap * torch.tanh(scale * self.ramp / cap) if cap else scale * self.ramp
        if len(logits) != len(expected) or not torch.allclose(logits, expected, rtol=1e-5):
            raise RefusedError(f"{type(self.model).__name__} does more to its logits than a factor and a soft cap")
        return scale, cap

    def _rotary(self, call: Call | None, kind: str, moved: list[str], turned: list[str]) -> str:
        """LayerInfo.rotary of a layer of this kind, from what changes with positions, and with frequencies."""
        keys = f"k of {label(call[0], self.names)}" if call else ""
        if keys not in moved:
            return ""
        of_kind = [name for name in self.frequencies if name.endswith(f".{kind}_inv_freq")]
        return (of_kind or [*self.frequencies, FIXED])[0] if keys in turned else FIXED

    def _layer_info(
        self,
        layer: nn.Module,
        call: Call | None,
        rotary: str,
        linear: LinearInfo | None,
        run: ObservedRun,
    ) -> LayerInfo:
        experts_per_token = run.experts_per_token
        active = _count_matrices(layer, experts_per_token)
        mixers = [call[0]] if call else []
        mixers += [self.model.get_submodule(linear.module)] if linear else []
        experts = next((part for part in layer.modules() if part in experts_per_token), None)
        return LayerInfo(
            name=self.names[layer],
            active_matrices=active,
            active_mlp_matrices=active - sum(_count_matrices(mixer, experts_per_token) for mixer in mixers),
            experts=self.names[experts] if experts else "",
            n_experts=len(next(experts.parameters())) if experts else 0,
            experts_per_token=experts_per_token[experts] if experts else 0,
            last_product=self._last_product(layer, run),
            linear=linear,
            **({"attention": self.names[call[0]], "rotary": rotary, **call[1]} if call else {}),
        )

    def _last_product(self, layer: nn.Module, run: ObservedRun) -> str:
        """LayerInfo.last_product."""
        modules = set(layer.modules())
        last = next((module for module in reversed(run.weighted) if module in modules), layer)
        matrix = last._parameters.get("weight")
        is_product = matrix is not None and matrix.dim() == 2 and last not in run.experts_per_token
        return self.names[last] if is_product else ""

    def _table_length(self) -> int:
        """Rows of the model's table of learned positions. Whisper's config has another name for it."""
        config = self.model.config
        return int(getattr(config, "max_position_embeddings", 0) or getattr(config, "max_target_positions", 0))

    def _routers(self) -> tuple[str, ...]:
        found: Any = self.model.base_model.can_record_outputs.get("router_logits", [])
        kinds: Any = tuple(getattr(one, "target_class", one) for one in (found if isinstance(found, list) else [found]))
        return tuple(name for module, name in self.names.items() if isinstance(module, kinds))


def _calls_within(layer: nn.Module, calls: list[Call]) -> list[Call]:
    modules = set(layer.modules())
    return [call for call in calls if call[0] in modules]


def _count_matrices(module: nn.Module, experts_per_token: _ExpertsPerToken) -> int:
    """Values in matrices; of these experts' only the share that a token is sent to."""
    return sum(
        parameter.numel() * experts_per_token.get(part, parameter.shape[0]) // parameter.shape[0]
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.dim() > 1 and "bias" not in name and not isinstance(part, nn.Embedding)
    )
