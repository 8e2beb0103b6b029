"""The frozen weights beside adapters, which no checkpoint holds: their names, and a digest of the files they are in."""

import hashlib
from pathlib import Path

import torch
from torch import nn

from torchtitan_cp.checkpoint.hub import open_tensors
from torchtitan_cp.config.contract import StoredTensor

DIGITS = 16


def frozen_names(part: nn.Module) -> set[str]:
    """Names of the parameters that are not trained, each with all names that it has."""
    parameters = part.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}


def digest_weights(folder: Path) -> str:
    """A digest of all tensors in a folder, however they are split over files.

    Of each tensor the name, size and dtype count, and the first, middle and last row: training changes all rows, and
    reading 16 GB would take a minute.

    Raises:
        ConfigError: there are no weights, or they cannot be read.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(open_tensors(folder).items()):
        digest.update(f"{name} {tensor.get_shape()} {tensor.get_dtype()}".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()[:DIGITS]


def _sample(tensor: StoredTensor) -> bytes:
    """Three rows; a vector as a whole."""
    rows, *others = tensor.get_shape() or [0]
    if not others or not rows:
        parts = [tensor[:]] if rows else []
    else:
        inner = [slice(0, 1)] * (len(others) - 1)
        parts = [tensor[(slice(row, row + 1), *inner)] for row in sorted({0, rows // 2, rows - 1})]
    return b"".join(part.contiguous().flatten().view(torch.uint8).numpy().tobytes() for part in parts)
