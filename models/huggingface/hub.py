"""Weights and config of a causal LM from and to files, by transformers' own rules of renaming and fusing.

Like `init.py`, it uses what transformers calls private.
"""

import copy
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers.core_model_loading as loading
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from models.huggingface.args import HuggingFaceArgs, parse_config, transformers_config
from models.huggingface.init import on_meta

logger = logging.getLogger(__name__)

LAYER = re.compile(r"layers\.(\d+)\.")

# With these, stored tensors of one shape lie side by side in ours, or ours lie in a stored one, so that a rank can read
# its share alone.
SIDE_BY_SIDE = "", "MergeModulelist", "MergeModulelist, Concatenate", "Split"


@torch.no_grad()
def load_weights(causal: PreTrainedModel, stored: Mapping[str, Any], read: Callable[..., bool]) -> None:
    """Fill parameters and persistent buffers in place, each rank reading its own share.

    Args:
        causal: plain, or sharded in any way; tied weights are one parameter.
        stored: hub name -> tensor in a file, as `safe_open(...).get_slice` gives it.
        read: (stored tensor, where it begins in ours, ours, compare=) reads this rank's share of it, or says whether it
            is equal to what is there.

    Raises:
        ValueError: tensors are missing, or of another shape, or the model has no place for them.
    """
    own = causal.state_dict(keep_vars=True)
    rules = _rules(causal, legacy=True)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    unknown = []
    # How many tensors of a pattern our tensor has had, and how many of its values.
    numbers, counts = Counter[tuple[str, str | None]](), Counter[Tensor]()
    for hub_name in sorted(stored, key=loading.dot_natural_key):
        tensor = stored[hub_name]
        name, pattern = loading.rename_source_key(hub_name, renamings, converters, causal.base_model_prefix, own)
        if name not in own and hub_name in own:
            name, pattern = hub_name, None
        if name not in own:
            unknown.append(hub_name)
            continue
        size, rows = tensor.get_shape(), 0
        targets = next((rule.target_patterns for rule in converters if pattern in rule.source_patterns), [name])
        for name in [name.replace(targets[0], target) for target in targets]:
            whole = own[name]
            start, shape = _box(converters, pattern, numbers[name, pattern], list(size))
            if len(targets) > 1:  # what is stored begins before ours
                start[0], shape[0], rows = -rows, len(whole), rows + len(whole)
            numbers[name, pattern] += 1
            beyond = any(begin + length > most for begin, length, most in zip(start, shape, whole.shape, strict=False))
            if len(shape) != whole.ndim or beyond or (pattern is None and shape != list(whole.shape)):
                raise ValueError(f"has {hub_name} of {size}, and the model's {name} is {list(whole.shape)}")
            tied = counts[whole] == whole.numel()
            if not read(tensor, start, whole, compare=tied):
                raise ValueError(f"has other values in {hub_name} than in the weight that it is tied to")
            counts[whole] += 0 if tied else math.prod(shape)
        if rows and rows != size[0]:
            raise ValueError(f"has {hub_name} of {size}, and the model has {rows} rows for it, {name} the last")
    _check_unknown(causal, unknown, stored)
    missing = [name for name, tensor in own.items() if counts[tensor] != tensor.numel()]
    if missing:
        raise ValueError(f"lacks some of {', '.join(missing[:3])} of the model ({len(missing)} such tensors)")


def _rules(causal: PreTrainedModel, *, legacy: bool) -> list[Any]:
    """How names and tensors of the hub become ours.

    Args:
        legacy: also the names of old files.

    Raises:
        ValueError: shares of a tensor cannot be read alone.
    """
    rules = get_model_conversion_mapping(causal, add_legacy=legacy)
    for rule in rules:
        operations = ", ".join(type(operation).__name__ for operation in getattr(rule, "operations", []))
        if operations not in SIDE_BY_SIDE:
            raise ValueError(f"has {rule.target_patterns[0]} in a form that is not supported: {operations}")
    return rules


def _check_unknown(causal: PreTrainedModel, hub_names: list[str], stored: Mapping[str, Any]) -> None:
    """Drop old buffers and heads that predict further tokens; refuse everything else that the model lacks.

    Such a head may be stored as a layer behind the others, with tensors that no other has.
    """
    rest = [name for name in hub_names if not name.endswith("rotary_emb.inv_freq")]
    heads = "|".join([r"(^|\.)mtp\.", *(causal._keys_to_ignore_on_load_unexpected or [])])
    most = getattr(causal.config, "num_nextn_predict_layers", 1) or 1
    used = Counter(LAYER.sub("", name) for name in stored)
    own = {number for name in rest for number in LAYER.findall(name) if used[LAYER.sub("", name)] <= most}
    layers = causal.config.num_hidden_layers
    for name in rest:
        if not re.search(heads, name) and not any(int(n) >= layers and n in own for n in LAYER.findall(name)):
            raise ValueError(f"has {name}, which the model of {layers} layers has no place for")
    if rest:
        logger.warning("%d stored tensors that this model does not use are left out, as %s", len(rest), rest[0])


def _box(converters: list[Any], pattern: str | None, number: int, shape: list[int]) -> tuple[list[int], list[int]]:
    """Where a stored tensor begins in ours, which may stack several or have them side by side, and its shape there.

    Args:
        pattern: of the converter that matched; None: it is all of ours.
        number: of the tensor among those of the pattern.
        shape: of the tensor.
    """
    start = [0] * len(shape)
    for patterns, operations in ((rule.source_patterns, rule.operations) for rule in converters):
        for operation in operations if pattern in patterns else ():
            if isinstance(operation, loading.MergeModulelist):
                start, shape = [number, *start], [1, *shape]
            elif isinstance(operation, loading.Concatenate):
                start[operation.dim] = patterns.index(pattern) * shape[operation.dim]
    return start, shape


def writer(args: HuggingFaceArgs) -> Callable[[str, Tensor, torch.dtype], dict[str, Tensor]]:
    """A function that turns a tensor of ours into the hub's: a parameter in this dtype, a buffer as it is.

    A weight that is tied to another gives none.
    """
    shadow = on_meta(transformers_config(args))
    # A prefix would be that of a model with images; what is split when it is read can be stored apart.
    rules = [rule for rule in _rules(shadow, legacy=False) if not isinstance(rule, loading.PrefixChange)]
    kept = [rule for rule in rules if isinstance(rule, loading.WeightRenaming) or len(rule.target_patterns) == 1]
    vars(shadow)["_weight_conversions"] = kept
    parameters, tied = dict(shadow.named_parameters()), shadow.all_tied_weights_keys

    def to_hub(name: str, tensor: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        ours = {} if name in tied else {name: tensor.to(dtype) if name in parameters else tensor}
        return loading.revert_weight_conversion(shadow, ours)

    return to_hub


def settings(args: HuggingFaceArgs, length: int = 0, rope: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config.json.

    Args:
        length: as trained.
        rope: `rope_parameters` of the full-attention layers as trained; None: the model's own.

    Raises:
        ValueError: the format cannot express them.
    """
    values = copy.deepcopy(args.sizes) | {"architectures": [args.look.model_class]}
    own = values.get("rope_parameters") or {}
    # Layers with windows keep rotary embeddings of their own.
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
        if values.get("original_max_position_embeddings"):
            values["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", length)
    # Where these follow the length, it stays; without a rotary embedding, it is that of a weight.
    if rope or kind not in (None, "dynamic", "longrope"):
        values["max_position_embeddings"] = length
    parse_config(values)  # a family may lack a kind of rotary embedding that frequencies alone can give it
    return values
