"""What the trainer knows about an architecture: its sizes by name, and how to build a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Hub:
    """How the checkpoints of an architecture look in Hugging Face's format.

    Attributes:
        names: our parameter -> theirs; `*` stands for the layer's number in both.
        sizes: config.json -> values of the args; ValueError says why it is not of this architecture.
        config: args -> config.json, without rotary embedding, length and tokens; ValueError says what the format
            cannot express.
        load: replaces `names` for models that a library builds: (part, hub name -> slice of a file, read) fills the
            part. `read` is `checkpoint.hub.read_shard`, which reads this rank's share of a slice. ValueError says what
            the files lack. With `load`, `config` also takes the trained length and `rope_parameters` (None: the model's
            own), and returns everything but the tokens.
        writer: with `load`: args -> (name, tensor, dtype) -> the hub's tensors; the tensor may be on the meta device.
    """

    names: Mapping[str, str]
    sizes: Callable[[Mapping[str, Any]], dict[str, Any]]
    config: Callable[..., dict[str, Any]]
    load: Callable[[nn.Module, Mapping[str, Any], Callable[..., bool]], None] | None = None
    writer: Callable[[Any], Callable[[str, Tensor, torch.dtype], dict[str, Tensor]]] | None = None


@dataclass(frozen=True)
class Architecture:
    """An architecture by name.

    Attributes:
        flavors: sizes by name, frozen dataclasses with `vocab_size`, `n_layers`, `n_heads`, `n_kv_heads`,
            `head_dim`, `ffn_dim`, `layer_windows`, `rotary_dim`, `rope_problem(kind)`, `logit_scale`, `logit_softcap`,
            `never_compiled_and_recomputed`, `longest`, `n_experts`, `attention_widths`, `state_sizes`,
            `linear_parameters()` and `problem()`; for the planner also `matrix_parameters()`, `small_parameters(tp)`,
            `embedding_parameters(tp)`, `active_ffn_dim`, `experts_per_token`, `fused_norms` and `heads_of(window)`
            (see LlamaArgs), and where some states are not 0 `state_widths` (see qwen3_5's HybridArgs).
        build: (args, attend) -> module with `layers` (a ModuleDict by number; each has `mlp`, a function of
            each token alone), `tok_embeddings`, `set_rope`, `init_std`, `keep`, which cuts it to a range of layers,
            `is_first` and `is_last`, and `forward(tokens, positions, plan, head)`. `attend` is called with (q, k, v,
            plan, window) and may be given `sinks=`, `scale=` and `softcap=`; `attend.sum_ranks(x, plan)` sums a tensor
            without gradient over the ranks that share each sequence; it is missing if no rank shares one.
            `attend.add_loss(hidden, loss_sum)` returns the hidden states and adds a loss of the model's own, a sum over
            tokens. A model with experts has `experts`, by number of the layer modules called
            with (hidden `[T, E]`, chosen `[T, K]`, shares `[T, K]`) whose parameters have the experts in dim 0, and may
            have `router_biases`, by number of the layer fp32 buffers `[X]` added to scores for the choice alone.
        sharding: pattern of module names -> role in tensor parallelism (`torchtitan_cp/parallel/tensor.py`).
        hub: names and sizes in Hugging Face's format; None if it has none.
        lacks: dotted key of the config -> why this architecture cannot have it on (a flag), or above 1 (a number).
        args_of: (config.json, overrides) -> args, for an architecture without flavors, whose config.json has all sizes;
            ValueError says why it is refused. A stage without `rope` then keeps the rotary embeddings of config.json.
        args_type: () -> the class of these args.
        needs: package that this architecture needs; "" if none.
    """

    name: str
    flavors: Mapping[str, Any]
    build: Callable[[Any, Any], nn.Module]
    sharding: Mapping[str, str]
    hub: Hub | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)
    args_of: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] | None = None
    args_type: Callable[[], type] | None = None
    needs: str = ""
