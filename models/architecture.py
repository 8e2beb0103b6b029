"""What an architecture shows to a trainer: its shapes by name and how a network is made of one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Architecture:
    """An architecture by name.

    Attributes:
        flavors: shapes by name, frozen dataclasses with `vocab_size`, `n_layers`, `n_heads`, `n_kv_heads`,
            `head_dim`, `ffn_dim`, `layer_windows`, `linear_parameters()` and `problem()`.
        build: (shape, attend) -> module with `layers` (a ModuleDict by number; each has `mlp`, a function of
            each token alone), `tok_embeddings`, `set_rope`, `init_std`, `keep`, which cuts it to some layers,
            `opens` and `closes`, and `forward(tokens, positions, plan, head)`.
        sharding: pattern of module names -> role in tensor parallelism (`torchtitan_cp/parallel/tensor.py`).
        published_rope: flavor -> keys of a stage's `rope` with which it was published.
    """

    name: str
    flavors: Mapping[str, Any]
    build: Callable[[Any, Any], nn.Module]
    sharding: Mapping[str, str]
    published_rope: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
