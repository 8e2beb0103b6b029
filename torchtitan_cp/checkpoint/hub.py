"""Weights from and to Hugging Face's format: safetensors files, with an index if there are several.

The architecture says what a parameter is called there. Each rank reads only its own shards, so no rank ever has the
whole model.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from torchtitan_cp.attention.local_shard import local_tensor, shard_slices
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.contract import Hub, ReadShard, StoredTensor

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = "*.safetensors*"  # both of them, and the files of an index
# Upper bound for one safetensors file; a tensor that exceeds it gets a file to itself.
MAX_FILE_BYTES = 5 * 2**30

# What a folder may hold in place of weights that can be read.
PICKLED = ".bin", ".pt", ".pth"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
SAVE_AGAIN = "save it with safetensors: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER)"
GIT_LFS = "run `git lfs pull` in that folder, or download it by `hf download NAME --local-dir FOLDER`"
COMPARED_ROWS = 4096  # rows of two tied weights that are compared at a time

# Names of the text model's tensors in multimodal checkpoints: newer ones, older ones, and Idefics and SmolVLM.
TEXT_PREFIX = re.compile(r"^(?:model\.language_model|language_model\.model|model\.text_model)\.")

# The second number of a hub name, an expert's; the first is the layer's.
ENTRY_NUMBER = re.compile(r"(\.\d+\..*)\.\d+\.")

# Bytes of dtypes by safetensors' names. Weights of other dtypes are quantized; buffers may be integers or booleans.
UNQUANTIZED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "BOOL": 1}


@torch.no_grad()
def _load_by_names(
    part: nn.Module,
    all_names: Iterable[str],
    stored: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    read: ReadShard,
) -> None:
    """Fill a part of a model, each rank its own shards.

    Args:
        part: sharded in any way; parameters have the names they have in the whole model.
        all_names: names of all parameters of the whole model.
        stored: hub name -> slice of a file.
        names: our names -> hub names, with `*` for a layer's number. A second `*` in the hub name numbers the entries
            of our first dim, as each expert is a tensor of its own there.
        read: (stored tensor, where it begins in ours, ours, compare=) -> False if `compare` finds other values.

    Raises:
        ValueError: a tensor is missing, has another shape or belongs to no parameter, or a tied output is stored too
            and differs from the embedding.
    """
    output = names["output.weight"]
    tied = output in stored and "output.weight" not in all_names
    expected = {output, *(_hub_pattern(name, names) for name in all_names)}
    weights = [name for name in stored if not name.endswith(".rotary_emb.inv_freq")]
    unknown = [name for name in weights if expected.isdisjoint((name, ENTRY_NUMBER.sub(r"\1.*.", name)))]
    if unknown:
        raise ValueError(f"has tensors that the model has no place for: {', '.join(unknown[:3])}")
    for name, parameter in part.named_parameters():
        tied_output = [(output, None)] if tied and name == "tok_embeddings.weight" else []
        for hub_name, entry in hub_names(name, parameter.shape, names) + tied_output:
            if hub_name not in stored:
                raise ValueError(f"has no tensor {hub_name}, which is our {name}")
            tensor, shape = stored[hub_name], list(parameter.shape)
            found, wanted = tensor.get_shape(), shape if entry is None else shape[1:]
            if found != wanted:
                raise ValueError(f"is of another model: {hub_name} has the shape {found}, and the model's is {wanted}")
            start = [entry or 0] + [0] * (len(shape) - 1)
            if not read(tensor, start, parameter, compare=tied and hub_name == output):
                raise ValueError(f"has other values in {hub_name} than in the weight that it is tied to")


def hub_names(name: str, shape: Sequence[int], names: Mapping[str, str]) -> list[tuple[str, int | None]]:
    """Hub names of our parameter, each with the entry of the first dim that it holds; None: the whole parameter.

    Args:
        shape: of the whole parameter.
        names: our names -> hub names, with `*` for a layer's number, and a second for an entry of the first dim.
    """
    hub_name = _hub_pattern(name, names)
    if "*" not in hub_name:
        return [(hub_name, None)]
    return [(hub_name.replace("*", str(entry)), entry) for entry in range(shape[0])]


def _hub_pattern(name: str, names: Mapping[str, str]) -> str:
    """Hub name of our parameter; a `*` in it stands for the number of an entry of the first dim."""
    layer = next((word for word in name.split(".") if word.isdigit()), "*")
    return names[re.sub(r"\.\d+\.", ".*.", name)].replace("*", layer, 1)


def read_shard(stored: StoredTensor, start: Sequence[int], whole: Tensor, *, compare: bool = False) -> bool:
    """Copy a stored tensor into this rank's shard of a parameter, as far as they overlap.

    Args:
        stored: a slice of a file. It may be a part of the parameter and lack first dims, of which it is one entry.
        start: where it begins in the parameter, per dim.
        whole: the parameter, sharded in any way.
        compare: compare the values and copy nothing.

    Returns:
        False if `compare` finds other values; otherwise True.
    """
    local, size = local_tensor(whole.detach()), stored.get_shape()
    missing_dims = whole.ndim - len(size)
    in_local, in_stored = list[slice](), list[slice]()
    for shard, begin, length in zip(shard_slices(whole), start, [1] * missing_dims + size, strict=True):
        low, high = max(shard.start, begin), min(shard.stop, begin + length)
        if low >= high:
            return True
        in_local.append(slice(low - shard.start, high - shard.start))
        in_stored.append(slice(low - begin, high - begin))
    target, values = local[tuple(in_local)], stored[tuple(in_stored[missing_dims:])]
    if compare:
        return torch.equal(target, values.to(target).view_as(target))
    target.copy_(values)
    return True


def open_tensors(folder: Path, names: Iterable[str] | None = None) -> dict[str, StoredTensor]:
    """Hub name -> slice of a file, of these tensors of a folder, or of all.

    Raises:
        ConfigError: there are no weights, or they cannot be read.
    """
    open_once, files = cache(_open), files_by_tensor(folder)
    stored, name = dict[str, StoredTensor](), ""
    try:
        for name in files if names is None else names:
            stored[name] = open_once(folder / files[name]).get_slice(name)
    except SafetensorError as error:
        raise _broken(folder, f"has no {name} in the file that its index names: {error}") from None
    return stored


def stored_bytes(tensor: StoredTensor) -> int:
    """Bytes of a slice of a file."""
    return math.prod(tensor.get_shape()) * UNQUANTIZED[tensor.get_dtype()]


def _open_text_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Hub name -> slice of a file. Of a multimodal model only the text model's, by the names of a text model."""
    stored = open_tensors(folder)
    if not any(map(TEXT_PREFIX.match, stored)):
        return stored
    text = dict[str, StoredTensor]()
    for name, tensor in stored.items():
        text_name = name_in_text_model(name)
        if text_name != name or name.startswith("lm_head."):
            text[text_name] = tensor
    return text


def name_in_text_model(name: str) -> str:
    """The name that a tensor of a multimodal checkpoint has in the text model."""
    return TEXT_PREFIX.sub("model.", name).removeprefix("language_model.")


def files_by_tensor(folder: Path) -> dict[str, str]:
    """Hub name -> file of a folder.

    Raises:
        ConfigError: there are no weights, or they cannot be read.
    """
    index = folder / INDEX_FILE
    try:
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: str(Path(file)) for name, file in files.items()}  # raises if a file has no name
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(folder, f"has an index that cannot be read: {error}") from None
    refuse_without_weights(folder, sorted(path.name for path in folder.iterdir()))
    with _open(folder / SINGLE_FILE) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def refuse_without_weights(where: object, names: Sequence[str]) -> None:
    """Refuse a folder, or a repository of the hub, that has no weights in safetensors files.

    Args:
        where: the folder or repository; names: of its files.

    Raises:
        ConfigError: there are none.
    """
    if {SINGLE_FILE, INDEX_FILE}.isdisjoint(names):
        found = next((name for name in names if name.endswith(PICKLED)), "")
        pickled = f"; {found} holds pickled weights, which are not read" if found else ""
        raise _broken(where, f"has neither {SINGLE_FILE} nor {INDEX_FILE}{pickled}", fix=SAVE_AGAIN if found else "")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        with suppress(OSError), path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise _broken(path, "is a pointer of Git LFS, not the weights", fix=GIT_LFS) from None
        raise _broken(path, f"cannot be read: {getattr(error, 'strerror', error)}") from None


def _broken(where: object, problem: str, fix: str = "") -> ConfigError:
    return ConfigError(
        f"model.hub_checkpoint: {where} {problem}",
        fix=fix
        or "give a folder with config.json and complete *.safetensors of this model, "
        "without model.overrides of its sizes",
    )


def save_hub_weights(folder: Path, sizes: Mapping[str, int], read: Callable[[list[str]], dict[str, Tensor]]) -> None:
    """Write tensors to safetensors files, one file after the other.

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
            (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read it


def load_parts(
    folder: Path, parts: Iterable[nn.Module], all_names: Iterable[str], hub: Hub, read: ReadShard = read_shard
) -> None:
    """Fill the parts of a model from a folder.

    Args:
        all_names: names of all parameters of the whole model.
        hub: of the architecture.
        read: see `read_shard`.

    Raises:
        ConfigError: the folder lacks tensors of this model, or has others.
    """
    stored = _open_text_tensors(folder)
    try:
        for name, tensor in stored.items():
            if tensor.get_dtype() not in UNQUANTIZED:
                raise ValueError(f"is quantized: {name} is {tensor.get_dtype()}; save it in bfloat16 first")
        for part in parts:
            if hub.load:
                hub.load(part, stored, read)
            else:
                _load_by_names(part, all_names, stored, hub.names, read)
    except ValueError as error:
        raise _broken(folder, str(error)) from None


def check_weights(folder: Path, model: nn.Module, hub: Hub) -> None:
    """Refuse what `load_parts` would refuse, by the files' headers; values are read only of a weight stored twice.

    Args:
        model: the whole model, on the meta device.
        hub: of the architecture.

    Raises:
        ConfigError: as `load_parts`.
    """
    first = dict[tuple[Tensor, tuple[int, ...]], StoredTensor]()

    def compare_tied(stored: StoredTensor, start: Sequence[int], whole: Tensor, *, compare: bool = False) -> bool:
        other = first.setdefault((whole, tuple(start)), stored)
        return not compare or other is stored or same_values(other, stored)

    load_parts(folder, [model], [name for name, _ in model.named_parameters()], hub, compare_tied)


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors of one shape are equal in fp32, which parameters have; some rows at a time."""
    rows = range(0, one.get_shape()[0], COMPARED_ROWS)
    pairs = ((x[row : row + COMPARED_ROWS].float() for x in (one, other)) for row in rows)
    return all(torch.equal(*pair) for pair in pairs)
