"""Weights from and to Hugging Face's format: safetensors files, with an index where there are several.

The architecture says what a parameter is called there. Each rank reads only its own shards, so no rank ever has the
whole model.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from operator import add, ge, sub
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from torchtitan_cp.attention.local_shard import local_tensor, shard_slices
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.load import build
from torchtitan_cp.config.rope import KEYS_BY_KIND
from torchtitan_cp.config.sections import Rope

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Of one safetensors file; a larger tensor has one of its own.
MAX_FILE_BYTES = 5 * 2**30

# Of the text model in files with images or sound: newer, older, and of Idefics and SmolVLM.
TEXT_PREFIX = re.compile(r"^(?:model\.language_model|language_model\.model|model\.text_model)\.")

# The last number of a hub name that has two: the first is the layer's.
ENTRY = re.compile(r"(\.\d+\..*)\.\d+\.")

# As safetensors names them: weights of other kinds are quantized; buffers may be whole numbers.
PLAIN = {"F64", "F32", "F16", "BF16", "I64", "BOOL"}

# Keys of a rotary embedding -> theirs; one has another name there.
ROPE_KEYS = {key: key for keys in KEYS_BY_KIND.values() for key in keys}
ROPE_KEYS["original_seq_len"] = "original_max_position_embeddings"
ATTENTION_KEYS = {"attention_factor", "mscale", "mscale_all_dim"}


@torch.no_grad()
def _load_by_names(part: nn.Module, whole: Iterable[str], stored: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Fill a part of a model, each rank its own shards.

    Args:
        part: sharded in any way; parameters have the names they have in the whole model.
        whole: names of all parameters of the whole model.
        stored: hub name -> slice of a file.
        names: our names -> hub names, with `*` for a layer's number. A second `*` in the hub name numbers the entries
            of our first dim, as experts are separate tensors there.

    Raises:
        ValueError: tensors are missing, one has another shape, the model has no place for it, or a tied output is
            stored too and is not the embedding.
    """
    output = names["output.weight"]
    tied = output in stored and "output.weight" not in whole
    known = {output, *(_hub_pattern(name, names) for name in whole)}
    weights = [name for name in stored if not name.endswith(".rotary_emb.inv_freq")]
    unknown = [name for name in weights if known.isdisjoint((name, ENTRY.sub(r"\1.*.", name)))]
    if unknown:
        raise ValueError(f"has tensors that the model has no place for: {', '.join(unknown[:3])}")
    for name, parameter in part.named_parameters():
        twice = [(output, None)] if tied and name == "tok_embeddings.weight" else []
        for hub_name, entry in hub_names(name, parameter.shape, names) + twice:
            if hub_name not in stored:
                raise ValueError(f"has no tensor {hub_name}, which is our {name}")
            tensor, shape = stored[hub_name], list(parameter.shape)
            theirs, ours = tensor.get_shape(), shape if entry is None else shape[1:]
            if theirs != ours:
                raise ValueError(f"is of another model: {hub_name} has the shape {theirs}, and the model's is {ours}")
            start = [entry or 0] + [0] * (len(shape) - 1)
            if not read_shard(tensor, start, parameter, compare=tied and hub_name == output):
                raise ValueError(f"has other values in {hub_name} than in the weight that it is tied to")


def hub_names(name: str, shape: Sequence[int], names: Mapping[str, str]) -> list[tuple[str, int | None]]:
    """Hub names of our parameter, and which entry of its first dim each is; None: all of it.

    Args:
        shape: of the whole parameter.
        names: see `_load_by_names`.
    """
    hub_name = _hub_pattern(name, names)
    if "*" not in hub_name:
        return [(hub_name, None)]
    return [(hub_name.replace("*", str(entry)), entry) for entry in range(shape[0])]


def _hub_pattern(name: str, names: Mapping[str, str]) -> str:
    """Hub name of our parameter, where `*` numbers the entries of its first dim."""
    layer = next((word for word in name.split(".") if word.isdigit()), "*")
    return names[re.sub(r"\.\d+\.", ".*.", name)].replace("*", layer, 1)


def read_shard(stored: Any, start: Sequence[int], whole: Tensor, *, compare: bool = False) -> bool:
    """Read what this rank has of a stored tensor, which may be a part of ours.

    Args:
        stored: a slice of a file.
        start: where it begins in ours; it may lack first dims, of which it is one entry.
        whole: ours, sharded in any way.
        compare: leave ours as it is.

    Returns:
        whether it is equal to what is there, if `compare`; otherwise it is copied there.
    """
    local, first, size = local_tensor(whole.detach()), [own.start for own in shard_slices(whole)], stored.get_shape()
    missing = whole.ndim - len(size)
    low = list(map(max, first, start))
    high = list(map(min, map(add, first, local.shape), map(add, start, [1] * missing + size)))
    if any(map(ge, low, high)):
        return True
    ours, theirs = (tuple(map(slice, map(sub, low, begin), map(sub, high, begin))) for begin in (first, start))
    place, values = local[ours], stored[theirs[missing:]]
    if compare:
        return torch.equal(place, values.to(place).view_as(place))
    place.copy_(values)
    return True


def _open_tensors(folder: Path) -> dict[str, Any]:
    """Name -> slice of a file. Of a multimodal model, the text model's, by the names that it has alone."""
    open_once = cache(_open)
    found, name = dict[str, Any](), ""
    try:
        for name, file in files_by_tensor(folder).items():
            found[name] = open_once(folder / file).get_slice(name)
    except SafetensorError as error:
        raise _broken(folder, f"has no {name} in the file that its index names: {error}") from None
    if not any(map(TEXT_PREFIX.match, found)):
        return found
    alone = {name: TEXT_PREFIX.sub("model.", name).removeprefix("language_model.") for name in found}
    return {alone[name]: tensor for name, tensor in found.items() if alone[name] != name or name.startswith("lm_head.")}


def files_by_tensor(folder: Path) -> dict[str, str]:
    """Hub name -> file of a folder.

    Raises:
        ConfigError: there are no weights, or they cannot be read.
    """
    index = folder / INDEX_FILE
    try:
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: str(Path(file)) for name, file in files.items()}  # raises where it is no name
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(folder, f"has an index that cannot be read: {error}") from None
    if not (folder / SINGLE_FILE).is_file():
        raise _broken(folder, f"has neither {SINGLE_FILE} nor {INDEX_FILE}")
    with _open(folder / SINGLE_FILE) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise _broken(path, f"cannot be read: {error}") from None


def _broken(where: Path, what: str) -> ConfigError:
    return ConfigError(
        f"model.hub_checkpoint: {where} {what}",
        fix="give a folder with config.json and complete *.safetensors of this model, "
        "without model.overrides of its sizes",
    )


def save_hub_weights(folder: Path, sizes: Mapping[str, int], read: Callable[[list[str]], dict[str, Tensor]]) -> None:
    """Write tensors one file after the other.

    Args:
        folder: exists and is empty.
        sizes: hub name -> bytes, in order.
        read: names -> {name: tensor} on the host; called once for each file, so that memory holds one file at a time.
    """
    groups, filled = list[list[str]](), math.inf
    for name, size in sizes.items():
        if filled + size > MAX_FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    files = [SINGLE_FILE]
    if len(groups) > 1:
        files = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
        file_by_tensor = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_by_tensor}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for file, names in zip(files, groups, strict=True):
        save_file(read(names), folder / file, metadata={"format": "pt"})
        with suppress(OSError):  # some file systems have no permissions
            (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors leaves it to its owner alone


def rope_parameters(rope: Rope, head_dim: int) -> dict[str, Any]:
    """A stage's rotary embedding as config.json's `rope_parameters`; head_dim is D."""
    if rope.kind == "ntk":  # another theta there
        return {"rope_type": "default", "rope_theta": rope.theta * rope.factor ** (head_dim / (head_dim - 2))}
    values = {ROPE_KEYS[key]: getattr(rope, key) for key in KEYS_BY_KIND[rope.kind]}
    if rope.kind == "longrope":
        values["short_factor"] = rope.short_factor or rope.long_factor
    # 0 and () ask for the paper's rule, and so does a missing key there.
    values = {key: list(x) if isinstance(x, tuple) else x for key, x in values.items() if x or x is False}
    return {"rope_type": "default" if rope.kind == "none" else rope.kind, "rope_theta": rope.theta, **values}


def fill_rope(rope: Rope, config: Mapping[str, Any]) -> Rope:
    """A stage's rotary embedding; theta and keys of its kind that the TOML omits come from a config.json.

    Raises:
        ConfigError: see `hub_rope`.
    """
    if not {"theta", *KEYS_BY_KIND[rope.kind]}.intersection(rope.omitted):
        return rope
    theirs, taken = hub_rope(config, rope.kind), set(rope.omitted)
    if not taken >= ATTENTION_KEYS:  # they exclude each other
        taken -= ATTENTION_KEYS
    elif "factor" not in taken and rope.factor != theirs.factor:  # it may follow from that
        taken.remove("attention_factor")
    return replace(rope, **{key: getattr(theirs, key) for key in taken})


def hub_rope(config: Mapping[str, Any], wanted: str = "") -> Rope:
    """The rotary embedding of a config.json, as a stage has it.

    Args:
        wanted: kind of a stage; of another one only theta is returned.

    Raises:
        ConfigError: a kind of scaling that a stage cannot have, or values of the wrong type.
    """
    try:
        values, config = _hub_rope_parameters(config), config.get("text_config", config)
        kind, problem = "none" if values["rope_type"] == "default" else str(values["rope_type"]), ""
        trained, key = config.get("max_position_embeddings") or 0, ROPE_KEYS["original_seq_len"]
        original = config.get(key) or values.get(key) or trained  # as in transformers, the one beside them comes first
        values = {"factor": trained / (original or 1), **values, key: original}
        if values.get("attention_factor") or not (values.get("mscale") and values.get("mscale_all_dim")):
            values |= {"mscale": 0.0, "mscale_all_dim": 0.0}
    except (AttributeError, TypeError) as error:
        kind, problem = "", f" that cannot be read: {error}"
    if wanted and kind not in ("", wanted):
        kind = "none"
    if kind not in KEYS_BY_KIND:
        raise ConfigError(
            f"model.hub_checkpoint: config.json has a rotary embedding{problem or f' of type {kind!r}'}",
            fix=f"give each stage a rope of its own, of a kind among {', '.join(KEYS_BY_KIND)}",
        )
    keys = {key: values[ROPE_KEYS[key]] for key in KEYS_BY_KIND[kind] if ROPE_KEYS[key] in values}
    table = {"theta": values["rope_theta"], "kind": kind, **keys}
    return build(Rope, table, where="rope", file="config.json of model.hub_checkpoint")


def rope_changes(config: Mapping[str, Any], rope: Rope, head_dim: int) -> list[str]:
    """What a stage changes of the rotary embedding of a config.json; head_dim is D."""
    theirs, ours = _hub_rope_parameters(config), rope_parameters(rope, head_dim)
    with suppress(ConfigError):  # of a kind that no stage has
        theirs = rope_parameters(hub_rope(config), head_dim)
    keys = "rope_type", "rope_theta", *ROPE_KEYS.values()
    return [f"{key} {theirs.get(key)} -> {ours.get(key)}" for key in keys if theirs.get(key) != ours.get(key)]


def _hub_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a config.json, of the layers without a window; before transformers 5 two keys held them."""
    config = config.get("text_config", config)
    # Without rope_theta, as in Llama 2's config.json, the families' classes take 10,000.
    older = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    newer = config.get("rope_parameters") or older
    full = newer.get("full_attention", newer) or {}  # null: no positions turn them
    values = {key: value for key, value in full.items() if value is not None}
    return {"rope_type": values.get("type", "default"), "rope_theta": older["rope_theta"], **values}


def load_parts(
    folder: Path, parts: Iterable[nn.Module], whole: Iterable[str], hub: Any, read: Callable[..., bool] = read_shard
) -> None:
    """Fill the parts of a model from a folder.

    Args:
        whole: names of all parameters of the whole model.
        hub: of the architecture, a `models.architecture.Hub`.
        read: of an architecture with `hub.load` another, so that parts on meta are checked alone.

    Raises:
        ConfigError: it lacks tensors of this model.
    """
    stored = _open_tensors(folder)
    try:
        for name, tensor in stored.items():
            if tensor.get_dtype() not in PLAIN:
                raise ValueError(f"is quantized: {name} is {tensor.get_dtype()}; save it in bfloat16 first")
        for part in parts:
            if hub.load:
                hub.load(part, stored, read)
            else:
                _load_by_names(part, whole, stored, hub.names)
    except ValueError as error:
        raise _broken(folder, str(error)) from None
