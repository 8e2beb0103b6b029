"""Weights from and to Hugging Face's format: safetensors files, with an index where there are several.

What a parameter is called there comes as data from the architecture. A rank reads of every tensor the part that it
holds, so no rank ever has the whole model.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.rope import TAKES
from torchtitan_cp.config.sections import Rope

logger = logging.getLogger(__name__)

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
GIB = 2**30

# Our kinds of rotary scaling -> theirs, and our keys -> theirs. `ntk` is another theta there.
KINDS = {"none": "default", "ntk": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
KINDS |= {"longrope": "longrope"}
ROPE_KEYS = {
    "factor": "factor",
    "original_seq_len": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    "long_factor": "long_factor",
    "short_factor": "short_factor",
}


def load_hub_weights(folder: Path, parts: Iterable[nn.Module], names: Mapping[str, str]) -> None:
    """Fill the parts of a model from a folder, each rank its own shards.

    Args:
        folder: with model.safetensors, or with an index and the files it names.
        parts: this rank's, of any placement; parameters have the names they have in the whole.
        names: our names -> theirs, with `*` for a layer's number, and in theirs another for an entry of our first dim.

    Raises:
        ConfigError: no such files, a tensor that is missing or has another shape, or one that the model has no place
            for.
    """
    files = _files_by_tensor(folder)
    _check_all_known(folder, files, names)
    with ExitStack() as opened, torch.no_grad():
        handles: dict[str, Any] = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                for theirs, shape, local, where in _pieces(parameter, hub_names(name, parameter.shape, names)):
                    file = files.get(theirs)
                    if file is None:
                        raise _broken(folder, f"has no tensor {theirs}, which is our {name}")
                    if file not in handles:
                        handles[file] = opened.enter_context(_open(folder / file))
                    _copy(handles[file].get_slice(theirs), shape, local, where, f"{folder / file}: {theirs}")


def hub_names(name: str, shape: Sequence[int], names: Mapping[str, str]) -> list[tuple[str, int | None]]:
    """Their names of our parameter, and which entry of its first dim each is; None: all of it.

    Args:
        shape: of the whole parameter.
        names: see `load_hub_weights`.
    """
    number = next((piece for piece in name.split(".") if piece.isdigit()), "*")
    theirs = names[re.sub(r"\.\d+\.", ".*.", name)].replace("*", number, 1)
    if "*" not in theirs:
        return [(theirs, None)]
    return [(theirs.replace("*", str(entry)), entry) for entry in range(shape[0])]


def _pieces(
    parameter: Tensor, theirs: Iterable[tuple[str, int | None]]
) -> Iterator[tuple[str, list[int], Tensor, tuple[slice, ...]]]:
    """(their name, shape there, where it goes in this rank's shard, what part of it) of all that this rank holds."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    shape, where = list(parameter.shape), shard_of(parameter)
    for name, entry in theirs:
        if entry is None:
            yield name, shape, local, where
        elif where[0].start <= entry < where[0].stop:
            yield name, shape[1:], local[entry - where[0].start], where[1:]


def _files_by_tensor(folder: Path) -> dict[str, str]:
    index = folder / INDEX_FILE
    try:
        if index.is_file():
            return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise _broken(folder, f"has an index that cannot be read: {error}") from None
    if not (folder / SINGLE_FILE).is_file():
        raise _broken(folder, f"has neither {SINGLE_FILE} nor {INDEX_FILE}")
    with _open(folder / SINGLE_FILE) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _check_all_known(folder: Path, files: Iterable[str], names: Mapping[str, str]) -> None:
    known = {*names.values(), "model.layers.*.self_attn.rotary_emb.inv_freq"}
    unknown = [name for name in files if re.sub(r"\.\d+\.", ".*.", name) not in known]
    if unknown:
        raise _broken(folder, f"has tensors that the model has no place for: {', '.join(unknown[:3])}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise _broken(path, f"cannot be read: {error}") from None


def _broken(where: Path, what: str) -> ConfigError:
    return ConfigError(
        f"model.hub_checkpoint: {where} {what}",
        fix="give a folder with config.json and complete *.safetensors of this model",
    )


def _copy(piece: Any, shape: list[int], local: Tensor, part: tuple[slice, ...], where: str) -> None:
    """Read a part of a tensor that lies in a file into this rank's memory."""
    if list(piece.get_shape()) != shape:
        raise ConfigError(
            f"{where} has the shape {list(piece.get_shape())}, and the model's is {shape}",
            fix="use the flavor and overrides of that checkpoint",
        )
    if local.numel():
        local.copy_(piece[part])


def shard_of(parameter: Tensor) -> tuple[slice, ...]:
    """Where this rank's shard lies in the whole. The inner axes of the mesh cut first: FSDP cuts what TP left."""
    spans = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis in reversed(range(mesh.ndim)):
            dim = getattr(parameter.placements[axis], "dim", None)
            if dim is not None:
                start, stop = spans[dim]
                share = -(-(stop - start) // mesh.size(axis))
                first = min(start + share * mesh.get_local_rank(axis), stop)
                spans[dim] = (first, min(first + share, stop))
    return tuple(slice(*span) for span in spans)


def save_hub_weights(folder: Path, tensors: Iterable[tuple[str, int]], read: Any, most_bytes: int) -> None:
    """Write tensors one file after the other.

    Args:
        folder: exists and is empty.
        tensors: (their name, bytes), in order.
        read: names -> {name: tensor} on the host; called once for each file, so that one is held at a time.
        most_bytes: of a file; a larger tensor has one of its own.
    """
    groups = list(_grouped(tensors, most_bytes))
    files = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    if len(groups) == 1:
        files = [SINGLE_FILE]
    for file, names in zip(files, groups, strict=True):
        save_file(read(list(names)), folder / file, metadata={"format": "pt"})
    if len(groups) > 1:
        sizes = {name: size for group in groups for name, size in group.items()}
        places = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _grouped(tensors: Iterable[tuple[str, int]], most_bytes: int) -> Iterator[dict[str, int]]:
    group: dict[str, int] = {}
    for name, size in tensors:
        if group and sum(group.values()) + size > most_bytes:
            yield group
            group = {}
        group[name] = size
    yield group


def rope_parameters(rope: Rope, head_dim: int) -> dict[str, Any]:
    """A stage's rotary embedding as config.json's `rope_parameters`; head_dim is D."""
    if rope.kind == "ntk":
        theta = rope.theta * rope.factor ** (head_dim / (head_dim - 2))
        return {"rope_type": "default", "rope_theta": theta}
    found = {ROPE_KEYS[key]: getattr(rope, key) for key in TAKES[rope.kind]}
    if rope.kind == "longrope":
        found["short_factor"] = rope.short_factor or rope.long_factor
    # 0 and () mean that the paper's rule holds, which is theirs too.
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items() if value != 0}
    found = {key: value for key, value in found.items() if value != []}
    return {"rope_type": KINDS[rope.kind], "rope_theta": rope.theta, **found}


def start_from_hub(folder: Path, parts: Iterable[nn.Module], names: Mapping[str, str], rope: Rope) -> None:
    """Fill the parts as `load_hub_weights`, and say where the first stage's rotary embedding is another than theirs.

    Args:
        rope: of the first stage.
    """
    folder = folder.expanduser()
    load_hub_weights(folder, parts, names)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Where none is said, as in Llama 2's, the families' classes have 10,000.
    apart = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    theirs = config.get("rope_parameters") or apart
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    ours = rope_parameters(rope, head_dim)
    keys = [key for key in ("rope_type", "rope_theta", *ROPE_KEYS.values()) if key in ours or key in theirs]
    theirs.setdefault("rope_type", theirs.get("type", "default"))
    changed = [f"{key} {theirs.get(key)} -> {ours.get(key)}" for key in keys if theirs.get(key) != ours.get(key)]
    logger.info("weights from %s", folder)
    if changed:
        logger.info("the first stage changes the rotary embedding they were trained with: %s", ", ".join(changed))
