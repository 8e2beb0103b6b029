"""Any causal language model of Hugging Face transformers, unmodified: built from its config.json."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from models.architecture import Architecture, Hub


def _args_of(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    return import_module("models.huggingface.args").args_from_config(config, overrides)


def _args_type() -> Any:
    return import_module("models.huggingface.args").HuggingFaceArgs


def _build(args: Any, attend: Any) -> nn.Module:
    model: nn.Module = import_module("models.huggingface.model").HuggingFaceModel(args, attend)
    return model


def _hub(name: str) -> Any:
    return getattr(import_module("models.huggingface.hub"), name)


# The library knows the names; `args_of` knows the sizes.
HUB = Hub(
    names={},
    sizes=dict,
    config=lambda *given: _hub("settings")(*given),
    load=lambda part, stored: _hub("load_weights")(part.causal, stored),
    writer=lambda args: _hub("writer")(args),
)

_OWN_LAYERS = "its layers are transformers' own"

# Imported when it is used: transformers takes seconds, and is an extra.
ARCHITECTURE = Architecture(
    name="huggingface",
    flavors={},
    build=_build,
    sharding={},
    hub=HUB,
    lacks={
        "parallel.tp": _OWN_LAYERS,
        "parallel.pp": _OWN_LAYERS,
        "activation.mlp_tiles": _OWN_LAYERS,
    },
    args_of=_args_of,
    args_type=_args_type,
    needs="transformers",
)
