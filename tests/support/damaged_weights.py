"""Folders of weights that no run can start from, and the ways in which files get there."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 4096\n"
)

Draw = random.Random


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def of_bytes(change: Callable[[bytes, Draw], bytes]) -> Callable[[Path, Draw], None]:
    """A damage to the bytes of one file of the folder."""

    def damage(folder: Path, draw: Draw) -> None:
        file = draw.choice(files_of(folder))
        file.write_bytes(change(file.read_bytes(), draw))

    return damage


def of_tensors(change: Callable[[dict[str, Tensor], str], None]) -> Callable[[Path, Draw], None]:
    """A damage to the tensors of one file, one of which is drawn."""

    def damage(folder: Path, draw: Draw) -> None:
        file = draw.choice(files_of(folder))
        tensors = load_file(file)
        change(tensors, draw.choice(sorted(tensors)))
        save_file(tensors, file)

    return damage


def drop_layer(folder: Path, draw: Draw) -> None:
    """A checkpoint of a model with one layer fewer, consistent in itself."""
    layer = f".layers.{draw.randrange(4)}."
    for file in files_of(folder):
        save_file({name: tensor for name, tensor in load_file(file).items() if layer not in name}, file)
    change_index(folder, lambda names: {name: file for name, file in names.items() if layer not in name})


def change_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        index.write_text(json.dumps({"weight_map": change(json.loads(index.read_text())["weight_map"])}))


def name_too_many(folder: Path, draw: Draw) -> None:
    """The index names a tensor that the file lacks; without an index the file has one that the model lacks."""
    tensor = "model.layers.0.self_attn.q_proj.scale"
    if (folder / "model.safetensors").is_file():
        file = folder / "model.safetensors"
        save_file(load_file(file) | {tensor: torch.ones(2)}, file)
    change_index(folder, lambda names: names | {tensor: draw.choice(sorted(names.values()))})


def pickle_only(folder: Path, draw: Draw) -> None:
    for path in (*files_of(folder), folder / "model.safetensors.index.json"):
        path.unlink(missing_ok=True)
    torch.save({"model.norm.weight": torch.ones(4)}, folder / draw.choice(["pytorch_model.bin", "consolidated.00.pth"]))


def add_output(folder: Path, equal: bool) -> None:
    """Store the output that is tied to the embedding too, with its values or with others."""
    for file in files_of(folder):
        tensors = load_file(file)
        if (tied := tensors.get("model.embed_tokens.weight")) is not None:
            output = tied.clone()
            output[-1, -1] += not equal
            save_file(tensors | {"lm_head.weight": output}, file)
            change_index(folder, lambda names: names | {"lm_head.weight": file.name})  # noqa: B023


def flip_bits(data: bytes, draw: Draw) -> bytes:
    """Other values, which nobody can see."""
    place = draw.randrange(header_end(data), len(data) - 2) & ~1
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


# What happens to a folder -> whether a run can start from it.
DAMAGES: dict[str, tuple[Callable[[Path, Draw], Any], bool]] = {
    "none": (lambda folder, draw: None, True),
    "bits flipped in the data": (of_bytes(flip_bits), True),
    "cut in the header's length": (of_bytes(lambda data, draw: data[: draw.randrange(8)]), False),
    "cut in the header": (of_bytes(lambda data, draw: data[: draw.randrange(8, header_end(data))]), False),
    "cut in the data": (of_bytes(lambda data, draw: data[: draw.randrange(header_end(data), len(data))]), False),
    "longer than it says": (of_bytes(lambda data, draw: data + bytes(draw.randrange(1, 99))), False),
    "zeros": (of_bytes(lambda data, draw: bytes(len(data))), False),
    "a pointer of Git LFS": (of_bytes(lambda data, draw: LFS_POINTER.encode()), False),
    "a file missing": (lambda folder, draw: draw.choice(files_of(folder)).unlink(), False),
    "a tensor missing": (of_tensors(lambda tensors, name: tensors.__delitem__(name)), False),
    "a tensor of another shape": (
        of_tensors(lambda tensors, name: tensors.update({name: torch.ones(len(tensors[name]) + 1, 3)})),
        False,
    ),
    "a tensor quantized": (
        of_tensors(lambda tensors, name: tensors.update({name: tensors[name].to(torch.int8)})),
        False,
    ),
    "a layer missing": (drop_layer, False),
    "a tensor too many": (name_too_many, False),
    "pickled weights only": (pickle_only, False),
    "an index that is not JSON": (
        lambda folder, draw: (folder / "model.safetensors.index.json").write_text("{"),
        False,
    ),
}
# Of a model whose output is the embedding.
TIED: dict[str, tuple[Callable[[Path, Draw], Any], bool]] = {
    "the output stored too": (lambda folder, draw: add_output(folder, equal=True), True),
    "the output stored with other values": (lambda folder, draw: add_output(folder, equal=False), False),
}
