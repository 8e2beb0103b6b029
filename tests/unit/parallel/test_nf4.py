"""Weights in NF4 beside torchao's own, and what a layer keeps for its backward."""

import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchao.quantization import to_nf4
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.contract import StoredTensor
from torchtitan_cp.parallel import nf4
from torchtitan_cp.parallel.nf4 import (
    GROUP,
    GROUP_BYTES,
    NF4Linear,
    check_nf4,
    dequantize,
    hold_in_nf4,
    quantize,
    whole_weights,
)

SHAPES = (128, 128), (256, 384), (64, 2048)
DTYPES = torch.float32, torch.bfloat16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(weight: Tensor, bias: Tensor | None = None) -> NF4Linear:
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None)
    if bias is not None:
        layer.bias.data = bias
    hold_in_nf4(layer, NF4Linear)
    assert isinstance(layer, NF4Linear)
    layer.store(weight)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantized_weights_are_those_of_torchao_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(nf4, "GROUPS_AT_ONCE", 4)
    weight = (0.02 * normal(*shape)).bfloat16()
    layer = layer_of(weight)
    assert layer.nf4.shape == (weight.numel() // GROUP, GROUP_BYTES)
    got = dequantize(layer.nf4, layer.nf4_pairs, dtype)
    assert got.dtype == dtype
    assert torch.equal(got.view(shape), to_nf4(weight).get_original_weight().to(dtype))
    assert 0.08 < (got.float() - weight.float().flatten()).norm() / weight.float().norm() < 0.1


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_equal_weights_stay_as_they_are(value: float) -> None:
    layer = layer_of(torch.full((128, 256), value))
    assert torch.equal(dequantize(layer.nf4, layer.nf4_pairs, torch.float32), torch.full((128 * 256,), value))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_and_its_gradient_are_those_of_torchao(dtype: torch.dtype) -> None:
    weight, bias = (0.02 * normal(256, 384)).bfloat16(), normal(256, seed=1).to(dtype)
    x, want_x = (normal(2, 5, 384, seed=2).to(dtype).requires_grad_() for _ in range(2))
    out, want = layer_of(weight, bias)(x), linear_nf4(want_x, to_nf4(weight)) + bias
    dout = normal(2, 5, 256, seed=3).to(dtype)
    out.backward(dout)
    want.backward(dout)
    assert out.dtype == dtype
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(x.grad, want_x.grad)


def test_a_backward_keeps_bytes_alone_also_of_a_compiled_layer() -> None:
    layer, kept = layer_of(0.02 * normal(256, 384)), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    for run in (layer, torch.compile(layer, fullgraph=True)):
        kept.clear()
        x = normal(3, 384).requires_grad_()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            out = run(x)
        assert {tuple(tensor.shape) for tensor in kept} == {(6, GROUP_BYTES), (256, 2)}
        out.sum().backward()
        assert torch.allclose(x.grad, dequantize(layer.nf4, layer.nf4_pairs, torch.float32).view(256, 384).sum(0))


class Stored:
    """A tensor of a file."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return [*self.tensor.shape]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        return self.tensor[index]


def test_a_weight_is_quantized_when_its_parts_are_read_and_its_layer_has_its_own_names_again() -> None:
    weight, other = normal(256, 128), normal(256, 128, seed=1)
    model = nn.ModuleDict({"one": layer_of(torch.zeros(256, 128)), "two": layer_of(torch.zeros(256, 128))})
    model["norm"] = nn.LayerNorm(4)
    names = [name for name, _ in model.named_parameters()]

    def read(stored: StoredTensor, start: Sequence[int], whole: Tensor, *, compare: bool = False) -> bool:
        assert not compare
        whole[start[0] : start[0] + len(stored[:])] = stored[:]
        return True

    with torch.no_grad(), whole_weights([model], read) as read_whole:
        weights = dict(model.named_parameters())
        assert weights["one.weight"].is_meta
        assert weights["one.weight"].shape == (256, 128)
        read_whole(Stored(weight[:64]), [0, 0], weights["one.weight"])
        read_whole(Stored(other), [0, 0], weights["two.weight"])
        read_whole(Stored(weight[64:]), [64, 0], weights["one.weight"])
        read_whole(Stored(torch.full((4,), 3.0)), [0], weights["norm.weight"])
        assert read_whole(Stored(weight), [0, 0], weights["one.weight"], compare=True)
    assert [name for name, _ in model.named_parameters()] == names
    for name, values in (("one", weight), ("two", other)):
        assert torch.equal(model[name].nf4, quantize(values))  # type: ignore[union-attr]
    assert model["norm"].weight.tolist() == [3.0] * 4  # type: ignore[union-attr]


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4, "SHARDS_BYTES", False)
    with pytest.raises(ConfigError, match=r"needs torch 2.13; FSDP of .* does not shard bytes\n.*base = 'bfloat16'"):
        check_nf4()


def test_without_torchao_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.setattr(nf4, "SHARDS_BYTES", True)
    message = r"lora.base = 'nf4' needs the package `torchao`, .*\n.*pip install 'torchtitan-cp\[float8\]'"
    for use in (check_nf4, lambda: quantize(torch.zeros(128, 128))):
        with pytest.raises(ConfigError, match=message):
            use()
