"""Sizes of a causal language model of transformers, from its config.json and from a probe of the model."""

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.architecture import HubConfig, Mixer
from models.huggingface.observed_run import KIMI_RULE, SCAN
from models.huggingface.probe import LayerInfo, ModelProbe, probe_model

# Keys about the files, the library or this machine, not about the model.
_FILE_KEYS = ("dtype", "torch_dtype", "quantization_config", "architectures", "auto_map", "_name_or_path")
_DROPPED = (*_FILE_KEYS, "transformers_version")


@dataclass(frozen=True)
class HuggingFaceArgs:
    """A model's config.json, and its sizes as the trainer and the planner need them (see models/architecture.py).

    Attributes:
        config: config.json of the text model, with overrides.
        vocab_size: V; 0 takes the tokenizer's.
    """

    config: HubConfig
    vocab_size: int = 0

    def __hash__(self) -> int:
        return hash((json.dumps(self.config, sort_keys=True), self.vocab_size))

    @cached_property
    def probe(self) -> ModelProbe:
        """Raises ValueError: the model cannot be trained as it is."""
        return _probe(self)

    @property
    def dim(self) -> int:
        return self.probe.dim

    @property
    def tie_embeddings(self) -> bool:
        return self.probe.tie_embeddings

    @property
    def longest(self) -> int:
        return self.probe.longest

    @property
    def logit_scale(self) -> float:
        return self.probe.logit_scale

    @property
    def logit_softcap(self) -> float:
        return self.probe.logit_softcap

    @property
    def n_layers(self) -> int:
        return len(self.probe.layers)

    @property
    def compile_conflict(self) -> str:
        """Why blocks are not compiled; empty if they may be."""
        return "its layers share weights, which are gathered within a layer" if self.probe.shares_weights else ""

    def compile_checkpoint_conflict(self, ep: int) -> str:
        """Why blocks are not compiled where they are recomputed; empty if they may be. See ModelArgs."""
        if self.config.get("num_kv_shared_layers"):  # Gemma 3n and 4
            return "layers of this model hand their keys on to later ones"
        return "its routers hand their logits on to the balance loss" if self.balance and ep == 1 else ""

    @cached_property
    def _widest(self) -> Mixer:
        """The layer with the widest attention."""
        return max(self.mixers, key=lambda mixer: mixer.width)

    @property
    def n_heads(self) -> int:
        return self._widest.n_heads

    @property
    def n_kv_heads(self) -> int:
        return self._widest.n_kv_heads

    @property
    def head_dim(self) -> int:
        return self._widest.head_dim

    @property
    def ffn_dim(self) -> int:
        """Of a gated feed-forward with as many weights for a token as the mean layer has outside attention."""
        return sum(layer.active_mlp_matrices for layer in self.probe.layers) // (3 * self.probe.dim * self.n_layers)

    active_ffn_dim = ffn_dim

    @property
    def experts_per_token(self) -> int:
        return max(layer.experts_per_token for layer in self.probe.layers)

    @property
    def n_experts(self) -> int:
        return max(layer.n_experts for layer in self.probe.layers)

    @property
    def balance(self) -> float:
        """Factor of the balance loss of the experts; 0: none."""
        return float(self.config.get("router_aux_loss_coef") or 0.0) if self.config.get("output_router_logits") else 0.0

    @cached_property
    def rotary_dim(self) -> int:
        """Of the layers of full attention, or of those with a window where it is all; 0: a stage changes no buffer."""
        attending = [layer for layer in self.probe.layers if layer.attention]
        layers = [layer for layer in attending if not layer.window] or attending
        names = (layer.rotary for layer in layers if not layer.rotary.endswith(".sliding_attention_inv_freq"))
        return next((self.probe.rotaries[name] for name in names if name in self.probe.rotaries), 0)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """What mixes tokens in each layer."""
        return tuple(_mixer(layer) for layer in self.probe.layers)

    @property
    def last_products(self) -> tuple[str, ...]:
        """See ModelArgs."""
        return tuple(layer.last_product for layer in self.probe.layers)

    def linear_parameters(self) -> int:
        """See LlamaArgs."""
        return sum(layer.active_matrices for layer in self.probe.layers) + self.probe.dim * self.probe.vocab_size

    @property
    def sizes(self) -> HubConfig:
        """`config` with the vocabulary in use; of another vocabulary no token is the config's padding."""
        if self.vocab_size in (0, self.config["vocab_size"]):
            return self.config
        return self.config | {"vocab_size": self.vocab_size, "pad_token_id": None}

    def problem(self) -> str | None:
        """None: the probe has refused what is not valid."""
        return None

    def rope_problem(self, kind: str) -> str | None:
        """Why a stage cannot have a `rope` of this kind, or None."""
        own = self.config.get("rope_parameters") or {}
        entries = [entry for entry in (own, *own.values()) if isinstance(entry, dict)]
        types = {entry.get("rope_type") for entry in entries}
        if not self.rotary_dim or self.probe.learned_positions:
            return f"{self.probe.model_class} has no rotary embedding in its layers of full attention"
        full = own.get("full_attention", own) or {}
        if "partial_rotary_factor" in full and int(self._widest.qk_dim * full["partial_rotary_factor"]) % 2:
            return f"{self.probe.model_class} turns an odd number of entries in each head"
        if "proportional" in types:
            return f"{self.probe.model_class} turns a part of each head, by frequencies of the whole head"
        if self.config.get("layer_rope_theta"):
            return f"{self.probe.model_class} has a theta for each layer"
        if self.probe.scale_follows_rope and any(entry.get("mscale_all_dim") for entry in entries):
            return f"{self.probe.model_class} scales its attention scores by its own YaRN, which an export would lose"
        if kind == "yarn" and self.probe.scale_follows_rope:
            return f"under YaRN {self.probe.model_class} would scale its attention scores by the factor too"
        return None


def _mixer(layer: LayerInfo) -> Mixer:
    attention = Mixer(layer.n_heads, layer.n_kv_heads, layer.qk_dim, layer.v_dim, layer.window, layer.softcap > 0)
    if not (linear := layer.linear):
        return attention
    values = linear.value_heads * linear.value_dim
    channels = 2 * linear.key_heads * linear.key_dim + values if linear.rule else linear.conv_channels
    return replace(
        attention,
        state_size=linear.state_size,
        state_channels=channels,
        state_values=values,
        state_heads=linear.value_heads,
        state_gates=linear.key_dim if linear.rule == KIMI_RULE else 1,
        state_products=2 if linear.rule == SCAN else 3,
    )


@lru_cache(maxsize=8)
def _probe(args: HuggingFaceArgs) -> ModelProbe:
    with torch.device("cpu"):  # the caller may be building on meta
        return probe_model(parse_config(args.sizes))


def args_from_config(config: HubConfig, overrides: HubConfig) -> HuggingFaceArgs:
    """The args of a config.json; of a multimodal one, those of its text model.

    Raises:
        ValueError: transformers has no such model, or cannot build it with these values, or the probe refuses it.
    """
    text, sizes = _text_model(config)
    known = text.to_dict()
    if unknown := [key for key in overrides if key not in known and key not in text.attribute_map]:
        near = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
        raise ValueError(f"{type(text).__name__} has no {unknown[0]!r}; {hint}")
    if layers := overrides.get("num_hidden_layers"):  # shorten the lists with a value for each layer
        lists = {key: value for key, value in sizes.items() if isinstance(value, list)}
        sizes |= {key: value[:layers] for key, value in lists.items() if len(value) == text.num_hidden_layers}
    sizes = {**sizes, **overrides}
    vocab_size = sizes.get("vocab_size", text.vocab_size)
    sizes = parse_config({**sizes, "vocab_size": vocab_size or text.vocab_size}).to_dict()
    kept = {key: value for key, value in sizes.items() if key not in _DROPPED}
    args = HuggingFaceArgs(json.loads(json.dumps(kept)), vocab_size)
    probe = args.probe  # refuses models that cannot be trained
    uncounted = args.balance and not (probe.routers and args.experts_per_token)
    if uncounted or (args.config.get("output_router_logits") and "aux_loss_coef" in args.config):
        raise ValueError(f"the balance loss of {probe.model_class} is not supported: set output_router_logits = false")
    return args


def _text_model(config: HubConfig) -> tuple[PreTrainedConfig, HubConfig]:
    """The text model's config, and the keys that its own class needs to make the same config."""
    whole = parse_config(config)
    text = whole.get_text_config(decoder=True)
    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"transformers has no causal language model of type {text.model_type!r}")
    written = next((config.get(key) for key, part in vars(whole).items() if part is text), config) or {}
    # Beside text_config this key has precedence.
    tie = {key: getattr(whole, key) for key in config.keys() & {"tie_word_embeddings"}}
    sizes = written = {**written, **tie, "model_type": text.model_type}
    # A multimodal config may have other defaults for its text model than the text model's class. A second pass adds
    # values that follow from these.
    for _ in range(2):
        alone = parse_config(sizes).to_dict()
        missing = {key: value for key, value in text.to_dict().items() if key not in written}
        sizes = sizes | {key: value for key, value in missing.items() if value != alone.get(key)}
    return text, sizes


def parse_config(config: HubConfig) -> PreTrainedConfig:
    """A config.json as transformers reads it. Raises ValueError: transformers refuses it."""
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        why = "and code from a checkpoint is not run" if config.get("auto_map") else "in this version"
        raise ValueError(f"model_type is {kind!r}, which transformers does not have, {why}")
    try:
        # Infinity is {"__float__": "Infinity"} in a file.
        return CONFIG_MAPPING[kind].from_dict(PreTrainedConfig._decode_special_floats(dict(config)))
    except Exception as error:
        raise ValueError(f"transformers refuses this config of {kind!r}: {error}") from error
