"""Weights and config of a causal LM from and to files, by transformers' own rules of renaming and fusing.

Like `init.py`, it uses what transformers calls private.
"""

import copy
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from operator import add, le
from typing import Any

import torch
import transformers.core_model_loading as loading
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from models.architecture import HubConfig, ReadShard, StoredTensor
from models.huggingface.args import HuggingFaceArgs, parse_config
from models.huggingface.init import on_meta

logger = logging.getLogger(__name__)

LAYER = re.compile(r"layers\.(\d+)\.")

# Chains of operations after which stored tensors lie side by side in ours, or ours in a stored one, so that a rank can
# read its share alone.
READABLE_CHAINS = "MergeModulelist", "MergeModulelist, Concatenate", "Concatenate", "Split"


@torch.no_grad()
def load_weights(causal: PreTrainedModel, stored: Mapping[str, StoredTensor], read: ReadShard) -> None:
    """Fill parameters and persistent buffers in place; each rank reads its own share.

    Args:
        causal: plain, or sharded in any way; tied weights are one parameter.
        stored: hub name -> tensor in a file, as `safe_open(...).get_slice` gives it.
        read: (stored tensor, where it begins in ours, ours, compare=) reads this rank's share. With `compare` it
            changes nothing, and returns whether the share is equal to what is there.

    Raises:
        ValueError: tensors are missing or have another shape, or the model has no place for them.
    """
    ours = causal.state_dict(keep_vars=True)
    placement = _Placement(causal, ours)
    values_read, unused = Counter[Tensor](), []
    for hub_name in sorted(stored, key=loading.dot_natural_key):
        size = stored[hub_name].get_shape()
        places = placement.find(hub_name, size)
        if not places:
            unused.append(hub_name)
        for name, start in places:
            whole = ours[name]
            tied = values_read[whole] == whole.numel()
            if not read(stored[hub_name], start, whole, compare=tied):
                raise ValueError(f"has other values in {hub_name} than in the weight that it is tied to")
            if not tied:
                values_read[whole] += min(math.prod(size), whole.numel())
    _check_unused(causal, unused)
    missing = [name for name, whole in ours.items() if values_read[whole] != whole.numel()]
    if missing:
        raise ValueError(f"lacks some of {', '.join(missing[:3])} of the model ({len(missing)} such tensors)")


class _Placement:
    """Finds where stored tensors belong in ours.

    Args:
        ours: name -> parameter or buffer of the model.

    Raises:
        ValueError: a rank could not read its share of some tensor alone.
    """

    def __init__(self, causal: PreTrainedModel, ours: dict[str, Tensor]) -> None:
        rules = get_model_conversion_mapping(causal, add_legacy=True)
        self.renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        self.converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        for rule in self.converters:
            chain = ", ".join(type(operation).__name__ for operation in rule.operations)
            if chain not in READABLE_CHAINS:
                raise ValueError(f"has {rule.target_patterns[0]} in a form that is not supported: {chain}")
        self.prefix, self.ours = causal.base_model_prefix, ours
        self.found = Counter[tuple[str, str | None]]()  # tensors so far, by our name and the pattern that matched

    def find(self, hub_name: str, size: list[int]) -> list[tuple[str, list[int]]]:
        """The names of ours of which a stored tensor of this size is a part, and where it begins in each.

        A tensor that holds several of ours begins before all but the first. Call this in the order of hub names.

        Raises:
            ValueError: the tensor does not fit.
        """
        name, pattern = loading.rename_source_key(hub_name, self.renamings, self.converters, self.prefix, self.ours)
        if name not in self.ours:
            name, pattern = hub_name, None
        if name not in self.ours:
            return []
        whole = list(self.ours[name].shape)
        rule: Any = next((rule for rule in self.converters if pattern in rule.source_patterns), None)
        if rule is None:
            places, fits = [(name, [0] * len(size))], size == whole
        elif len(rule.target_patterns) > 1:
            names = [name.replace(rule.target_patterns[0], target) for target in rule.target_patterns]
            ends = list(accumulate(len(self.ours[part]) for part in names))
            places = [(part, [-begin] + [0] * (len(size) - 1)) for part, begin in zip(names, [0, *ends], strict=False)]
            whole = [ends[-1], *whole[1:]]
            fits = size == whole
        else:
            start, shape = [0] * len(size), size
            for operation in rule.operations:
                if isinstance(operation, loading.MergeModulelist):
                    start, shape = [self.found[name, pattern], *start], [1, *shape]
                elif isinstance(operation, loading.Concatenate):
                    dim, index = operation.dim, rule.source_patterns.index(pattern)
                    start[dim] = index * shape[dim]
                    if len(rule.operations) == 1 and index == len(rule.source_patterns) - 1:
                        start[dim] = whole[dim] - shape[dim]  # the values of a convolution may be wider than its keys
            places, fits = [(name, start)], len(shape) == len(whole) and all(map(le, map(add, start, shape), whole))
        if not fits:
            raise ValueError(f"has {hub_name} of {size}, and the model's {name} is {whole}")
        self.found[name, pattern] += 1
        return places


def _check_unused(causal: PreTrainedModel, hub_names: list[str]) -> None:
    """Ignore old buffers and heads that predict further tokens; refuse everything else that the model lacks."""
    layers = causal.config.num_hidden_layers
    unused = [name for name in hub_names if not name.endswith("rotary_emb.inv_freq")]
    heads = prediction_heads(layers, unused)
    if others := [name for name in unused if name not in heads]:
        ignored = "|".join(causal._keys_to_ignore_on_load_unexpected or ["(?!)"])
        for name in others:
            if not re.search(ignored, name):
                raise ValueError(f"has {name}, which the model of {layers} layers has no place for")
        logger.warning("%d stored tensors that this model does not use are left out, as %s", len(others), others[0])
    if heads:
        logger.warning(
            "heads that predict further tokens are not trained (%d tensors, as %s): speculative decoding with them "
            "accepts fewer tokens as the model changes. An export has them as they are in this checkpoint; to bring "
            "them back, train them on it",
            len(heads),
            min(heads),
        )


def prediction_heads(layers: int, hub_names: Iterable[str]) -> set[str]:
    """Those hub names that are of heads for multi-token prediction.

    A layer after the model's own that has an `eh_proj`, which joins a hidden state with an embedding, is such a head.

    Args:
        layers: of the model.
    """
    names = list(hub_names)
    numbers = {number for name in names if ".eh_proj." in name for number in LAYER.findall(name)}
    after = {number for number in numbers if int(number) >= layers}
    return {name for name in names if re.search(r"(^|\.)mtp\.", name) or not after.isdisjoint(LAYER.findall(name))}


def writer(args: HuggingFaceArgs) -> Callable[[str, Tensor, torch.dtype], dict[str, Tensor]]:
    """A function (name, tensor, dtype) -> the hub's tensors: parameters in this dtype, buffers as they are.

    It returns nothing for a weight that is tied to another.
    """
    shadow = on_meta(parse_config(args.sizes))
    # A prefix is for a model with images; tensors that are split on reading may be stored separately.
    rules = get_model_conversion_mapping(shadow, add_legacy=False)
    kept = [rule for rule in rules if isinstance(rule, loading.WeightRenaming) or len(rule.target_patterns) == 1]
    vars(shadow)["_weight_conversions"] = [rule for rule in kept if not isinstance(rule, loading.PrefixChange)]
    parameters, tied = dict(shadow.named_parameters()), shadow.all_tied_weights_keys

    def to_hub(name: str, tensor: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        ours = {} if name in tied else {name: tensor.to(dtype) if name in parameters else tensor}
        return loading.revert_weight_conversion(shadow, ours)

    return to_hub


def settings(args: HuggingFaceArgs, length: int = 0, rope: HubConfig | None = None) -> HubConfig:
    """A config.json.

    Args:
        length: of the sequences it was trained on.
        rope: `rope_parameters` with which the full-attention layers were trained; None: the model's own.

    Raises:
        ValueError: the format cannot express them.
    """
    values = copy.deepcopy(args.sizes) | {"architectures": [args.probe.model_class]}
    own = values.get("rope_parameters") or {}
    # A separate rotary embedding of layers with windows stays as it is.
    full = own.get("full_attention", own) or {}
    kind = full.get("rope_type")
    if rope:
        if kind is None:
            raise ValueError(f"it has a rotary embedding of type {kind}, and a stage's is {rope['rope_type']}")
        kept = {key: full[key] for key in ("partial_rotary_factor", "llama_4_scaling_beta") if key in full}
        if "llama_4_scaling_beta" in full:  # it counts from this length
            original = full["original_max_position_embeddings"]
            if rope.get("original_max_position_embeddings", original) != original:
                raise ValueError(f"it scales scores by position from {original} on, so original_seq_len has to be that")
            kept["original_max_position_embeddings"] = original
        full.clear()
        full.update(rope, **kept)
        if own is not full and rope["rope_type"] == "yarn":
            _set_truncate(values, rope.get("truncate", True))
        if values.get("original_max_position_embeddings"):
            values["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", length)
    # The frequencies of these types follow this length, as a missing factor does, and learned positions have it as a
    # size, so it stays.
    if rope or (kind not in (None, "dynamic", "longrope") and full.get("factor", 1)):
        values["max_position_embeddings"] = length
    # A null is left out where it is the class's default. transformers' yarn and longrope take this one as it is.
    defaults = parse_config({"model_type": values["model_type"]}).to_dict()
    if "head_dim" in values and values["head_dim"] is None:
        values["head_dim"] = args.probe.layers[0].qk_dim
    values = {key: value for key, value in values.items() if value is not None or defaults.get(key) is not None}
    # A family may refuse a type of rotary embedding, although its model runs with such frequencies.
    parse_config(values)
    return dict(PreTrainedConfig._encode_special_floats(values))


def _set_truncate(values: HubConfig, truncate: bool) -> None:
    """Write yarn's `truncate` where transformers reads it if layers have different rotary embeddings: beside them.

    Raises:
        ValueError: the family refuses it there.
    """
    own = values["rope_parameters"]
    if own.get("truncate", True) == truncate:
        return
    own["truncate"] = truncate
    try:
        parse_config(values)
    except ValueError:
        raise ValueError(
            f"transformers reads truncate = {str(truncate).lower()} beside full_attention, where "
            f"{values['model_type']} does not take it"
        ) from None
