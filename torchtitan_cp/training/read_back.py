"""Reads a config.json back through transformers: the angles that it would turn a trained model's heads by."""

import json
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from torchtitan_cp.config.contract import HubConfig
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.curriculum import rope_frequencies
from torchtitan_cp.curriculum.rope import powers

# In parts of the larger of a frequency and its unscaled one. transformers computes in fp32: exponents are rounded by
# 5.5e-7, and the blends of yarn and llama3 by up to 1.4e-6 more.
TOLERANCE = 3e-6

Rotaries = dict[tuple[str, str], tuple[list[float], float]]


def knows(config: HubConfig) -> bool:
    """Whether transformers is installed, in a version that has the model of this config.json."""
    if find_spec("transformers") is None:
        return False
    return config["model_type"] in _transformers().CONFIG_MAPPING


def _transformers() -> ModuleType:
    return import_extra("transformers", extra="hub", needed_by="reading an export back")


def check_rotaries(
    config: HubConfig, rope: Rope | None, rotary_dim: int, seq_len: int, start: HubConfig | None = None
) -> None:
    """Check that transformers reads a config.json, and with the frequencies that the model was trained with.

    Args:
        config: as it is, or is to be, written.
        rope: of the stage; None: the model's own.
        rotary_dim: entries of a head that RoPE rotates.
        seq_len: S of the stage, in tokens.
        start: config.json before training, whose rotary embeddings a stage does not change where layers have windows;
            None: all layers have the stage's.

    Raises:
        ValueError: transformers refuses the config, or would compute other frequencies.
    """
    found, kept = rotaries(_frozen(config), seq_len), rotaries(_frozen(start), seq_len) if start else {}
    wanted = rope_frequencies(rope, rotary_dim, seq_len) if rope else None
    theta = rope.theta if rope else 1.0
    for (module, layer_type), (frequencies, factor) in found.items():
        changed = wanted and layer_type in ("", "full_attention")
        expected, expected_factor = wanted if wanted and changed else kept[module, layer_type]
        unscaled = powers(theta, rotary_dim) if changed else [0.0] * len(expected)
        same = len(frequencies) == len(expected) and abs(factor - expected_factor) <= TOLERANCE * expected_factor
        for have, want, base in zip(frequencies, expected, unscaled, strict=same):
            same = same and abs(have - want) <= TOLERANCE * max(abs(want), base)
        if not same:
            layers = f"layers of {layer_type}" if layer_type else "its layers"
            kind = f"kind = {rope.kind!r}" if rope and changed else "the model's own kind"
            raise ValueError(
                f"transformers {_transformers().__version__} would give {layers} other rotary frequencies than "
                f"training does, with {kind}"
            )


def _frozen(config: HubConfig) -> str:
    return json.dumps(config, sort_keys=True)


@lru_cache(maxsize=16)
def rotaries(config: str, seq_len: int) -> Rotaries:
    """Frequencies, in radians a position, and the factor on cos and sin, by module and layer type ("": all layers).

    Args:
        config: config.json of a causal language model.
        seq_len: of the sequences, in tokens; some kinds follow it.

    Raises:
        ValueError: transformers refuses the config.
    """
    transformers, found = _transformers(), Rotaries()
    values = transformers.PreTrainedConfig._decode_special_floats(json.loads(config))  # as it reads a file
    try:
        described = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32)
        with torch.device("cpu"), torch.no_grad():
            for name, module in model.named_modules():
                if hasattr(module, "rope_type"):
                    found |= {(name, kind): of_kind for kind, of_kind in _of_module(module, seq_len)}
    except Exception as error:  # its functions raise errors of many types
        raise ValueError(f"transformers does not read the config.json: {error}") from error
    return found


def _of_module(module: Any, seq_len: int) -> list[tuple[str, tuple[list[float], float]]]:
    """The frequencies of a rotary embedding that lies on the meta device, by layer type."""
    rotary, found = type(module)(module.config), []
    for layer_type in rotary.rope_type if isinstance(rotary.rope_type, dict) else ("",):
        kind = rotary.rope_type[layer_type] if layer_type else rotary.rope_type
        if kind in ("longrope", "dynamic"):  # a forward chooses them by the last position
            rotary(torch.zeros(1, 1, 2), torch.tensor([[seq_len - 1]]), *filter(None, [layer_type]))
        prefix = f"{layer_type}_" if layer_type else ""
        frequencies = getattr(rotary, f"{prefix}inv_freq").tolist()
        found.append((layer_type, (frequencies, float(getattr(rotary, f"{prefix}attention_scaling")))))
    return found
