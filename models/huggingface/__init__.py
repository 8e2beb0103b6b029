"""Any causal language model of Hugging Face transformers, unmodified: built from its config.json."""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from models.architecture import Architecture, Hub

if TYPE_CHECKING:
    from models.huggingface.args import HuggingFaceArgs

# transformers imports torchao if it is installed, and torchao then warns about parts that this machine lacks.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def _later(module: str, name: str) -> Callable[..., Any]:
    """A function or class of this folder, imported when it is called: transformers takes seconds, and is an extra."""
    return lambda *given: getattr(import_module(f"models.huggingface.{module}"), name)(*given)


# The library knows the names; `args_of` knows the sizes.
HUB = Hub(
    names={},
    sizes=dict,
    config=_later("hub", "settings"),
    load=lambda part, stored, read: _later("hub", "load_weights")(part.causal, stored, read),
    writer=_later("hub", "writer"),
    kept=lambda args, hub_names: _later("hub", "prediction_heads")(args.n_layers, hub_names),
)

ARCHITECTURE: "Architecture[HuggingFaceArgs]" = Architecture(
    name="huggingface",
    flavors={},
    build=_later("model", "HuggingFaceModel"),
    sharding={},
    hub=HUB,
    lacks=dict.fromkeys(("parallel.tp", "parallel.pp", "activation.mlp_tiles"), "its layers are transformers' own"),
    args_of=_later("args", "args_from_config"),
    args_type=lambda: import_module("models.huggingface.args").HuggingFaceArgs,
    needs="transformers",
)
