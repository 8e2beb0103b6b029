"""Frozen linear layers whose weights are stored in NF4, and are in bf16 only while they multiply.

NF4 has 16 values, the quantiles of a normal distribution. Each block of 64 weights has a scale, and each group of 256
scales is in 8 bits with a factor of its own (double quantization). A group of 16,384 weights is a row of bytes, so that
FSDP shards the rows of a weight as it shards other parameters. Source: QLoRA (Dettmers et al., 2023); values are
computed by torchao.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from torchtitan_cp.attention.local_shard import local_tensor, shard_slices
from torchtitan_cp.attention.operator import operator
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.contract import ReadShard, StoredTensor
from torchtitan_cp.config.extras import import_extra

BLOCK, BLOCKS = 64, 256  # weights that share a scale, and scales that share a factor; those of QLoRA
GROUP = BLOCK * BLOCKS
# A row: the codes, two in a byte with the first in its higher half; the scales, int8; their factor and mean, bf16.
SCALES = slice(GROUP // 2, GROUP // 2 + BLOCKS)
FACTOR = slice(SCALES.stop, SCALES.stop + 2)
MEAN = slice(FACTOR.stop, FACTOR.stop + 2)
GROUP_BYTES = MEAN.stop
WEIGHT_BYTES = GROUP_BYTES / GROUP  # 4.127 bits

GROUPS_AT_ONCE = 512  # 8M weights: enough for a GPU, and little beside the whole matrix
# While that many are dequantized, an int32 index for two weights and their bf16 values: bytes for a weight.
LOOKUP_BYTES = 2 + 2
DTYPE = torch.bfloat16
SHARDS_BYTES = TorchVersion(torch.__version__) >= "2.13"  # before, FSDP makes parameters that require gradients of them
PARAMETER = "nf4"
VALUES = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0),
)


def check_nf4() -> None:
    """Refuse what weights in NF4 lack.

    Raises:
        ConfigError: torch is too old, or torchao is missing.
    """
    if not SHARDS_BYTES:
        raise ConfigError(
            f"lora.base = 'nf4' needs torch 2.13; FSDP of {torch.__version__} does not shard bytes",
            fix="upgrade torch, or use base = 'bfloat16'",
        )
    _import_torchao()


def _import_torchao() -> ModuleType:
    return import_extra("torchao.quantization", extra="float8", needed_by="lora.base = 'nf4'")


def quantize(weight: Tensor) -> Tensor:
    """Rows of bytes, `[groups, GROUP_BYTES]` uint8, of a whole weight in bf16, whose size is a multiple of GROUP.

    Raises:
        ConfigError: torchao is missing.
    """
    found = _import_torchao().to_nf4(weight.to(DTYPE).contiguous(), BLOCK, BLOCKS)
    groups = weight.numel() // GROUP
    factors = torch.stack([found.quantization_factor, found.scaler_mean.expand(groups)], 1)
    parts = found.quantized_data.view(groups, -1), found.quantized_scalers.view(groups, -1), factors
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def dequantize(rows: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of rows of bytes, flat, with the bf16 values that torchao gives them.

    Args:
        rows: `[groups, GROUP_BYTES]`.
        pairs: `[256, 2]`, the values of the two codes in each byte.
        dtype: of the result.
    """
    weights = torch.empty((len(rows), BLOCKS, BLOCK), dtype=dtype, device=rows.device)
    for part, out in zip(rows.split(GROUPS_AT_ONCE), weights.split(GROUPS_AT_ONCE), strict=True):
        scales, factor, mean = part[:, SCALES].view(torch.int8), part[:, FACTOR].view(DTYPE), part[:, MEAN].view(DTYPE)
        values = nn.functional.embedding(part[:, : SCALES.start].int(), pairs).view_as(out)
        torch.mul(values, (scales / factor + mean).unsqueeze(-1), out=out)
    return weights.flatten()


@operator("nf4_product")
def product(x: Tensor, rows: Tensor, pairs: Tensor, *, backward: bool) -> Tensor:
    """x `[..., in]` times the transposed weight `[out, in]`; with `backward`, x `[..., out]` times the weight.

    An operator, so that neither autograd nor the compiler keeps the dequantized weight for the backward.
    """
    weight = dequantize(rows, pairs, x.dtype)
    matrix = weight.view(x.shape[-1], -1) if backward else weight.view(-1, x.shape[-1]).t()
    return (x.reshape(-1, x.shape[-1]) @ matrix).view(*x.shape[:-1], -1)


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]
    backward: bool

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def _save_for_backward(
    ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor], keyword_only_inputs: dict[str, bool], output: Tensor
) -> None:
    _, rows, pairs = inputs
    ctx.backward = keyword_only_inputs["backward"]
    ctx.save_for_backward(rows, pairs)


def _backward(ctx: _Context, dout: Tensor) -> tuple[Tensor, None, None]:
    rows, pairs = ctx.saved_tensors
    return torch.ops.torchtitan_cp.nf4_product(dout, rows, pairs, backward=not ctx.backward), None, None


product.register_fake(lambda x, rows, _, **named: x.new_empty((*x.shape[:-1], len(rows) * GROUP // x.shape[-1])))
product.register_autograd(_backward, setup_context=_save_for_backward)
PRODUCT = torch.ops.torchtitan_cp.nf4_product.default


class NF4Linear(nn.Linear):
    """A linear layer whose weight is stored in NF4 and has no gradient. `hold_in_nf4` makes it.

    Attributes:
        nf4: rows of bytes, `[groups, GROUP_BYTES]`, in place of the weight.
        nf4_pairs: `[256, 2]`, the values of the two codes in each byte.
    """

    nf4: nn.Parameter
    nf4_pairs: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = product(x, self.nf4, self.nf4_pairs, backward=False)
        return out if self.bias is None else out + self.bias

    def store(self, weight: Tensor) -> None:
        """Quantize a whole weight `[out, in]` and keep this rank's rows."""
        self._store(weight, self.nf4)

    @torch.no_grad()
    def _store(self, weight: Tensor, rows: Tensor) -> None:
        local_tensor(rows).copy_(quantize(weight)[shard_slices(rows)])


def _pairs() -> Tensor:
    values = torch.tensor(VALUES, dtype=DTYPE)
    return torch.stack([values.repeat_interleave(len(VALUES)), values.repeat(len(VALUES))], 1)


def hold_in_nf4(layer: nn.Linear, kind: type[NF4Linear]) -> None:
    """Make a linear layer on any device an NF4Linear of this kind, in place; `store` gives it its weight."""
    weight = layer.weight
    del layer.weight
    layer.__class__ = kind
    assert isinstance(layer, NF4Linear)
    rows = torch.empty((weight.numel() // GROUP, GROUP_BYTES), dtype=torch.uint8, device=weight.device)
    layer.nf4 = nn.Parameter(rows, requires_grad=False)
    layer.register_buffer("nf4_pairs", _pairs().to(weight.device), persistent=False)


def fill_tables(model: nn.Module, device: torch.device) -> None:
    """Give the layers in NF4 their tables of values, which `to_empty` leaves without, on the device that computes."""
    for layer in model.modules():
        if isinstance(layer, NF4Linear):
            layer.nf4_pairs = _pairs().to(device)


@contextmanager
def whole_weights(parts: Iterable[nn.Module], read: ReadShard) -> Iterator[ReadShard]:
    """Give the layers of a model's parts the weights that they have in its base, without memory, to fill them by name.

    Args:
        read: fills other parameters.

    Yields:
        what to read with. It quantizes a weight when all of it was read, so that one is in memory at a time.
    """
    layers = {layer: layer.nf4 for part in parts for layer in part.modules() if isinstance(layer, NF4Linear)}
    by_weight = dict[Tensor, NF4Linear]()
    for layer in layers:
        del layer.nf4
        weight = torch.empty((layer.out_features, layer.in_features), dtype=DTYPE, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        by_weight[layer.weight] = layer
    incomplete = dict[Tensor, tuple[Tensor, int]]()  # values, and how many are missing

    def read_whole(stored: StoredTensor, start: Sequence[int], whole: Tensor, *, compare: bool = False) -> bool:
        if whole not in by_weight:
            return read(stored, start, whole, compare=compare)
        if compare:  # a second name of a weight, whose values were compared before the model was built
            return True
        layer = by_weight[whole]
        rows = layers[layer]
        # Rows may be in host memory, where quantizing would take minutes.
        values, missing = incomplete.pop(whole, (torch.empty_like(whole, device=layer.nf4_pairs.device), whole.numel()))
        read(stored, start, values, compare=False)
        missing -= min(math.prod(stored.get_shape()), whole.numel())
        if missing:
            incomplete[whole] = values, missing
        else:
            layer._store(values, rows)
        return True

    try:
        yield read_whole
    finally:
        for layer, rows in layers.items():
            del layer.weight
            layer.nf4 = rows
