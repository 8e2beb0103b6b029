"""Messages of K and V: what is encoded is decoded."""

import pytest
import torch

from torchtitan_cp.attention.codec import CODECS


@pytest.mark.parametrize("name", CODECS)
def test_rows_of_zeros_are_zeros_where_denormals_are_flushed(name: str) -> None:
    k, v = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 16)
    codec = CODECS[name]
    torch.set_flush_denormal(True)
    try:
        decoded = codec.decode(codec.encode(k, v), 4, k, v)
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(got, want) for got, want in zip(decoded, (k, v), strict=True))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8)])
def test_a_message_without_rows_is_empty(name: str, shape: tuple[int, ...]) -> None:
    x, codec = torch.zeros(shape), CODECS[name]
    message = codec.encode(x, x)
    assert message.numel() == codec.new_message(shape[1], x, x).numel() == 0
    assert all(got.shape == x.shape for got in codec.decode(message, shape[1], x, x))
