"""Encodings of K and V rows as one flat message: exact, or in 8 bits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_cp.attention.collectives import unpack

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
SCALE_BYTES = 4


@dataclass(frozen=True)
class Codec:
    """How KV rows travel.

    Attributes:
        encode: (k `[B, n, H, Dqk]`, v `[B, n, H, Dv]`) -> a flat message.
        decode: (message, n, k, v) -> [k, v] of n rows, with the heads, dims and dtype of the given k and v.
        dtype: of a message; None: that of k and v.
        scale_elements: how many elements each row of a head takes beside its values.
    """

    encode: Callable[[Tensor, Tensor], Tensor]
    decode: Callable[[Tensor, int, Tensor, Tensor], list[Tensor]]
    dtype: torch.dtype | None = None
    scale_elements: int = 0

    def row_bytes(self, elements: int, element_bytes: int) -> int:
        """Bytes of one token's K and V of one head.

        Args:
            elements: Dqk + Dv; element_bytes: of the dtype of k and v.
        """
        value_bytes = self.dtype.itemsize if self.dtype else element_bytes
        return value_bytes * (elements + 2 * self.scale_elements)

    def new_message(self, rows: int, k: Tensor, v: Tensor) -> Tensor:
        """An empty message to receive `rows` rows into."""
        row_elements = k.shape[3] + v.shape[3] + 2 * self.scale_elements
        return k.new_empty(rows * k.shape[0] * k.shape[2] * row_elements, dtype=self.dtype)


def _encode_exact(k: Tensor, v: Tensor) -> Tensor:
    message = k.new_empty(k.numel() + v.numel())
    for part, x in zip(unpack(message, (k.shape, v.shape)), (k, v), strict=True):
        part.copy_(x)
    return message


def _decode_exact(message: Tensor, rows: int, k: Tensor, v: Tensor) -> list[Tensor]:
    """Views of the message, without a copy."""
    return unpack(message, [(len(x), rows, *x.shape[2:]) for x in (k, v)])


def _encode_float8(k: Tensor, v: Tensor) -> Tensor:
    """One scale for each row of each head."""
    parts = []
    for x in (k, v):
        scale = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(SMALLEST_SCALE)
        parts += [(x.float() / scale).to(FLOAT8).view(torch.uint8).flatten(), scale.view(torch.uint8).flatten()]
    return torch.cat(parts)


def _decode_float8(message: Tensor, rows: int, k: Tensor, v: Tensor) -> list[Tensor]:
    decoded = []
    for x in (k, v):
        vectors = rows * x.shape[0] * x.shape[2]
        values, scales, message = message.tensor_split([vectors * x.shape[3], vectors * (x.shape[3] + SCALE_BYTES)])
        # Copied, since a scale may begin at an address that is not a multiple of 4 bytes.
        floats = values.view(FLOAT8).view(vectors, x.shape[3]).float() * scales.clone().view(torch.float32)[:, None]
        decoded.append(floats.to(x.dtype).view(x.shape[0], rows, *x.shape[2:]))
    return decoded


CODECS = {
    "exact": Codec(_encode_exact, _decode_exact),
    "float8": Codec(_encode_float8, _decode_float8, torch.uint8, SCALE_BYTES),
}
