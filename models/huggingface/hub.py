"""Weights and config of a causal LM from and to files, by transformers' own rules of renaming and fusing.

What transformers calls private is used here and in `init.py` alone.
"""

import copy
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from operator import add, ge, sub
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from models.huggingface.args import HuggingFaceArgs, transformers_config
from models.huggingface.init import on_meta

logger = logging.getLogger(__name__)

# As safetensors names them: weights of other kinds are quantized; buffers may be whole numbers.
PLAIN = {"F64", "F32", "F16", "BF16", "I64", "BOOL"}
# Of the text model in files with images or sound, newer and older.
TEXT_PREFIX = re.compile(r"^(?:model\.language_model|language_model\.model)\.")
# With these, stored tensors lie side by side in ours, so that a rank can read its share alone.
SIDE_BY_SIDE: tuple[list[type], ...] = ([], [MergeModulelist], [Concatenate], [MergeModulelist, Concatenate])


class Piece(NamedTuple):
    """A stored tensor: where it begins in ours, and its shape there."""

    hub_name: str
    start: list[int]
    shape: list[int]


@torch.no_grad()
def load_weights(causal: PreTrainedModel, stored: Mapping[str, Any]) -> None:
    """Fill parameters and persistent buffers in place, each rank reading its own share.

    Args:
        causal: plain, or sharded in any way; tied weights are one parameter.
        stored: hub name -> tensor in a file, as `safe_open(...).get_slice` gives it.

    Raises:
        ValueError: tensors are missing, of another shape or quantized, or the model has no place for them.
    """
    own, stored = causal.state_dict(keep_vars=True), _text_part(stored)
    for hub_name, tensor in stored.items():
        if tensor.get_dtype() not in PLAIN:
            raise ValueError(f"is quantized: {hub_name} is {tensor.get_dtype()}; save it in bfloat16 first")
    rules = _rules(causal, legacy=True)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    # Our name -> pattern of a converter, or our name again -> hub names in order.
    sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    unknown = []
    for hub_name in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(hub_name, renamings, converters, causal.base_model_prefix, own)
        if name not in own and hub_name in own:
            name, pattern = hub_name, None
        if name in own:
            sources[name][pattern or name].append(hub_name)
        else:
            unknown.append(hub_name)
    _check_unknown(causal, unknown)
    filled: set[int] = set()
    for name, hub_names in sources.items():
        fused = next((rule for rule in converters if hub_names.keys() & {*rule.source_patterns}), None)
        whole, pieces = own[name], _pieces(name, fused, hub_names, stored)
        ends = [max(ends) for ends in zip(*(map(add, piece.start, piece.shape) for piece in pieces), strict=False)]
        if ends != list(whole.shape) or sum(math.prod(piece.shape) for piece in pieces) != whole.numel():
            shape = stored[pieces[-1].hub_name].get_shape()
            raise ValueError(
                f"has {pieces[-1].hub_name} with the shape {shape}: the model's {name} is {list(whole.shape)}"
            )
        _fill(whole, pieces, stored, again=id(whole) in filled)
        filled.add(id(whole))
    missing = [name for name, tensor in own.items() if id(tensor) not in filled]
    if missing:
        raise ValueError(f"has nothing for {', '.join(missing[:3])} of the model ({len(missing)} in all)")


def _rules(causal: PreTrainedModel, *, legacy: bool) -> list[Any]:
    """How names and tensors of the hub become ours.

    Args:
        legacy: also the names of old files.

    Raises:
        ValueError: shares of a tensor cannot be read alone.
    """
    rules = get_model_conversion_mapping(causal, add_legacy=legacy)
    for rule in rules:
        operations = getattr(rule, "operations", [])
        if [type(operation) for operation in operations] not in SIDE_BY_SIDE:
            raise ValueError(f"has {rule.target_patterns[0]} in a form that is not supported: {operations}")
    return rules


def _text_part(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors of the text model, by the names they have where it stands alone."""
    if not any(map(TEXT_PREFIX.match, stored)):
        return stored
    alone = {name: TEXT_PREFIX.sub("model.", name).removeprefix("language_model.") for name in stored}
    return {alone[name]: stored[name] for name in stored if alone[name] != name or name.startswith("lm_head.")}


def _check_unknown(causal: PreTrainedModel, hub_names: list[str]) -> None:
    """Drop old buffers and heads that predict further tokens; refuse everything else that the model lacks."""
    rest = [name for name in hub_names if not name.endswith("rotary_emb.inv_freq")]
    heads = "|".join([r"(^|\.)mtp\.", *(causal._keys_to_ignore_on_load_unexpected or [])])
    layers = causal.config.num_hidden_layers
    for name in rest:
        if not re.search(heads, name) and not any(int(n) >= layers for n in re.findall(r"layers\.(\d+)\.", name)):
            raise ValueError(f"has {name}, which the model has no place for")
    if rest:
        logger.warning("%d weights of heads that predict further tokens are left out, as %s", len(rest), rest[0])


def _pieces(
    name: str, fused: WeightConverter | None, hub_names: Mapping[str, list[str]], stored: Mapping[str, Any]
) -> list[Piece]:
    """What is stored of a tensor of ours.

    Args:
        fused: the rule by which several stored tensors are one of ours.
        hub_names: by the rule's patterns.
    """
    operations: list[Any] = fused.operations if fused else []
    stacked = any(isinstance(operation, MergeModulelist) for operation in operations)
    # The dim along which patterns follow each other.
    dim = next((operation.dim for operation in operations if isinstance(operation, Concatenate)), None)
    pieces: list[Piece] = []
    offset = 0
    for pattern in fused.source_patterns if fused else [name]:
        for number, hub_name in enumerate(hub_names[pattern]):
            shape = [1] * stacked + list(stored[hub_name].get_shape())
            start = [0] * len(shape)
            if stacked:
                start[0] = number
            if dim is not None:
                start[dim] = offset
            pieces.append(Piece(hub_name, start, shape))
        offset += pieces[-1].shape[dim] if dim is not None else 0
    return pieces


def _fill(whole: Tensor, pieces: list[Piece], stored: Mapping[str, Any], *, again: bool) -> None:
    """Read this rank's share of a tensor of ours.

    Args:
        again: it is tied to one that is filled already, and has to be equal.
    """
    local, first = whole.detach(), (0,) * whole.ndim
    if isinstance(local, DTensor):
        _, first = compute_local_shape_and_global_offset(whole.shape, local.device_mesh, local.placements)
        local = local.to_local()
    for hub_name, start, shape in pieces:
        low = list(map(max, first, start))
        high = list(map(min, map(add, first, local.shape), map(add, start, shape)))
        if any(map(ge, low, high)):
            continue
        ours, theirs = (tuple(map(slice, map(sub, low, begin), map(sub, high, begin))) for begin in (first, start))
        values = stored[hub_name][theirs[len(shape) - len(stored[hub_name].get_shape()) :]]
        if again and not torch.equal(local[ours], values.to(local).view_as(local[ours])):
            raise ValueError(f"has other values in {hub_name} than in the weight that it is tied to")
        local[ours].copy_(values)


def writer(args: HuggingFaceArgs) -> Callable[[str, Tensor, torch.dtype], dict[str, Tensor]]:
    """A function that turns a tensor of ours into the hub's: a parameter in this dtype, a buffer as it is.

    A weight that is tied to another gives none.

    Raises:
        ValueError: several tensors of ours are one there.
    """
    shadow = on_meta(transformers_config(args))
    # A prefix would be that of a model with images.
    rules = [rule for rule in _rules(shadow, legacy=False) if not isinstance(rule, PrefixChange)]
    vars(shadow)["_weight_conversions"] = rules
    parameters, tied = dict(shadow.named_parameters()), shadow.all_tied_weights_keys

    def to_hub(name: str, tensor: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        ours = {} if name in tied else {name: tensor.to(dtype) if name in parameters else tensor}
        hub_tensors: dict[str, Tensor] = revert_weight_conversion(shadow, ours)
        return hub_tensors

    return to_hub


def settings(args: HuggingFaceArgs, length: int, rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """A config.json.

    Args:
        length: as trained.
        rope: `rope_parameters` of the full-attention layers as trained; None: the model's own.

    Raises:
        ValueError: the format cannot express them.
    """
    causal = on_meta(transformers_config(args))
    _rules(causal, legacy=False)
    sizes = {"vocab_size": args.vocab_size or args.config["vocab_size"]}
    values = copy.deepcopy(args.config) | sizes | {"architectures": [type(causal).__name__]}
    own = values.get("rope_parameters") or {}
    # Layers with windows keep rotary embeddings of their own.
    full = own.get("full_attention", own) or {}
    kind = full.get("rope_type")
    if rope:
        if kind is None or (kind == "proportional" and rope["rope_type"] != "default"):
            raise ValueError(f"it has a rotary embedding of type {kind}, and a stage's is {rope['rope_type']}")
        partial = {"partial_rotary_factor": full["partial_rotary_factor"]} if "partial_rotary_factor" in full else {}
        full.clear()
        full.update(rope, **partial, **({"rope_type": kind} if kind == "proportional" else {}))
        if values.get("original_max_position_embeddings"):
            values["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", length)
    # Where these follow the length, it stays; without a rotary embedding, it is that of a weight.
    if rope or kind not in (None, "dynamic", "longrope"):
        values["max_position_embeddings"] = length
    return values
