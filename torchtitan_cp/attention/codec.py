"""Rows of K and V as one flat message, exact or in 8 bits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_cp.attention.errors import PlanError

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SCALE_BYTES = 4


@dataclass(frozen=True)
class Codec:
    """How KV rows travel.

    Attributes:
        encode: (k `[B, n, H, Dqk]`, v `[B, n, H, Dv]`) -> a flat message.
        new_message: (n, k, v) -> an empty message of n rows, to receive into.
        decode: (message, n, k, v) -> (k, v) of n rows, with the heads, dims and dtype of the given k and v.
    """

    encode: Callable[[Tensor, Tensor], Tensor]
    new_message: Callable[[int, Tensor, Tensor], Tensor]
    decode: Callable[[Tensor, int, Tensor, Tensor], tuple[Tensor, Tensor]]


def find_codec(name: str) -> Codec:
    """A codec by name.

    Raises:
        PlanError: an unknown name.
    """
    if name not in CODECS:
        raise PlanError(f"kv_transfer {name!r} is not available", fix=f"use one of {', '.join(CODECS)}")
    return CODECS[name]


def _encode_exact(k: Tensor, v: Tensor) -> Tensor:
    message = k.new_empty(k.numel() + v.numel())
    message[: k.numel()].view(k.shape).copy_(k)
    message[k.numel() :].view(v.shape).copy_(v)
    return message


def _new_exact(rows: int, k: Tensor, v: Tensor) -> Tensor:
    return k.new_empty(rows * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]))


def _decode_exact(message: Tensor, rows: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the message, without a copy."""
    shape_k, shape_v = (k.shape[0], rows, *k.shape[2:]), (v.shape[0], rows, *v.shape[2:])
    boundary = rows * k.shape[0] * k.shape[2] * k.shape[3]
    return message[:boundary].view(shape_k), message[boundary:].view(shape_v)


def _encode_float8(k: Tensor, v: Tensor) -> Tensor:
    """One scale for each row of each head."""
    parts = []
    for x in (k, v):
        scale = x.abs().amax(-1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / LARGEST
        parts += [(x.float() / scale).to(FLOAT8).view(torch.uint8).flatten(), scale.view(torch.uint8).flatten()]
    return torch.cat(parts)


def _new_float8(rows: int, k: Tensor, v: Tensor) -> Tensor:
    row_bytes = k.shape[3] + v.shape[3] + 2 * SCALE_BYTES
    return k.new_empty(rows * k.shape[0] * k.shape[2] * row_bytes, dtype=torch.uint8)


def _decode_float8(message: Tensor, rows: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    decoded, start = [], 0
    for x in (k, v):
        vectors = rows * x.shape[0] * x.shape[2]
        values = message[start : start + vectors * x.shape[3]].view(FLOAT8)
        start += values.numel()
        # Copied, since a scale may begin at an address that is not a multiple of 4 bytes.
        scales = message[start : start + vectors * SCALE_BYTES].clone().view(torch.float32)
        start += vectors * SCALE_BYTES
        rows_of_x = values.view(vectors, x.shape[3]).float() * scales[:, None]
        decoded.append(rows_of_x.to(x.dtype).view(x.shape[0], rows, *x.shape[2:]))
    return decoded[0], decoded[1]


CODECS = {
    "exact": Codec(_encode_exact, _new_exact, _decode_exact),
    "float8": Codec(_encode_float8, _new_float8, _decode_float8),
}
