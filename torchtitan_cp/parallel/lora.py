"""Adapters of low rank beside the frozen linear layers of the blocks, sharded as the layers are.

Source: LoRA (Hu et al., 2021); first values and names as in PEFT.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torchtitan_cp.config.contract import LanguageModel
from torchtitan_cp.config.training import Lora
from torchtitan_cp.parallel.lora_targets import find_targets
from torchtitan_cp.parallel.nf4 import NF4Linear, hold_in_nf4

BASE_DTYPE = torch.bfloat16
ADAPTER_NAMES = "lora_a", "lora_b"


class LoRALinear(nn.Linear):
    """A linear layer that adds scale x A^T B^T to its output. `add_adapters` makes it.

    Attributes:
        lora_a: `[rank, in]`; lora_b: `[out, rank]`; fp32. Under tensor parallelism, a layer with sharded outputs shards
            B by its rows, one with sharded inputs shards A by its columns, and the other matrix is replicated.
        lora_scale: factor of what they add.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        a, b = self.lora_a, self.lora_b
        if not isinstance(out, DTensor):
            # One kernel multiplies and adds. `selective` does not keep its output, as baddbmm is not in PRODUCTS.
            rows, narrow = (y.reshape(-1, *y.shape[-2:]) for y in (out, F.linear(x, a)))
            return torch.baddbmm(rows, narrow, b.t().expand(len(rows), -1, -1), alpha=self.lora_scale).view_as(out)
        # Each rank multiplies what it has: its columns of the output, or its share of a sum over the input.
        x, a_local, b_local = map(_local, (x, a, b))
        added = F.linear(self.lora_scale * F.linear(x, a_local), b_local)
        return out + DTensor.from_local(
            added, out.device_mesh, out.placements, run_check=False, shape=out.shape, stride=out.stride()
        )


class NF4LoRALinear(LoRALinear, NF4Linear):
    """A LoRALinear whose frozen weight is stored in NF4."""


def merged_state(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """The state dict of a model that is not sharded, with each adapter added to its weight in fp32.

    Returns:
        name -> a function that computes the tensor, so that not all are in fp32 at once.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}

    def merged(layer: LoRALinear) -> Tensor:
        return layer.weight.float() + layer.lora_scale * (layer.lora_b.float() @ layer.lora_a.float())

    def as_it_is(tensor: Tensor) -> Tensor:
        return tensor

    state = dict[str, Callable[[], Tensor]]()
    for name, tensor in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if module in layers and leaf == "weight":
            state[name] = partial(merged, layers[module])
        elif leaf not in ADAPTER_NAMES:
            state[name] = partial(as_it_is, tensor)
    return state


def _local(x: Tensor) -> Tensor:
    """This rank's part of a factor. Where it is replicated, each rank's gradient is a part of the whole one."""
    assert isinstance(x, DTensor)
    partial = [Partial() if placement.is_replicate() else placement for placement in x.placements]
    return x.to_local(grad_placements=partial)


def apply_lora(model: LanguageModel, lora: Lora) -> None:
    """Freeze a model that is not sharded, and add adapters; in place."""
    freeze_base(model, lora)
    add_adapters(model, lora)


def freeze_base(model: LanguageModel, lora: Lora) -> None:
    """Freeze all weights of a whole model but those trained whole, and store the frozen ones in bf16; in place."""
    trained = set(find_targets(model, lora).trained)
    for name, parameter in model.named_parameters():
        if name not in trained:
            parameter.data = parameter.data.to(BASE_DTYPE)
            parameter.requires_grad_(False)


def add_adapters(model: LanguageModel, lora: Lora) -> None:
    """Give the linear layers that [lora] names their adapters, in place; their values are drawn by `draw_adapter`.

    With lora.base = "nf4", frozen layers lose their weights: `NF4Linear.store` takes them. The layers stay the same
    objects, with their hooks; only their class changes.
    """
    targets = find_targets(model, lora)
    for name in targets.adapted:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        a, b = _empty_adapter(layer.weight, lora.rank)
        layer.__class__ = LoRALinear
        assert isinstance(layer, LoRALinear)
        layer.lora_a, layer.lora_b, layer.lora_scale = nn.Parameter(a), nn.Parameter(b), lora.scale
    for name in targets.quantized:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        hold_in_nf4(layer, NF4LoRALinear if isinstance(layer, LoRALinear) else NF4Linear)


def _empty_adapter(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A `[rank, in]` and B `[out, rank]` for a weight `[out, in]`, sharded as that is."""
    rows, columns = weight.shape
    a, b = (torch.empty(shape, dtype=torch.float32, device=weight.device) for shape in ((rank, columns), (rows, rank)))
    if isinstance(weight, DTensor):
        a, b = _shard_like(a, weight, 1), _shard_like(b, weight, 0)
    return a, b


def _shard_like(matrix: Tensor, weight: DTensor, dim: int) -> DTensor:
    """Shard a matrix along one dim where the weight is sharded along that, else replicate it."""
    placements = [Shard(dim) if placement.is_shard(dim) else Replicate() for placement in weight.placements]
    return distribute_tensor(matrix, weight.device_mesh, placements)


@contextmanager
def hidden_adapters(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Take the adapters out of the parameters of a model's parts, which then have the names that its base has."""
    layers = [module for part in parts for module in part.modules() if isinstance(module, LoRALinear)]
    adapters = [{name: layer._parameters.pop(name) for name in ADAPTER_NAMES} for layer in layers]
    try:
        yield
    finally:
        for layer, matrices in zip(layers, adapters, strict=True):
            layer._parameters.update(matrices)


def draw_adapter(name: str, parameter: Tensor, seed: int, device: torch.device) -> Tensor:
    """The first values of a whole adapter matrix: A uniform within 1 / sqrt(in), as PEFT draws it, and B zero."""
    values = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    if name.endswith("lora_a"):
        bound = 1 / math.sqrt(parameter.shape[1])
        values.uniform_(-bound, bound, generator=torch.Generator(values.device).manual_seed(seed))
    return values
