"""A small Llama with linear layers in float8, and its loss."""

import dataclasses
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig

from models.llama import Llama, LlamaArgs
from tests.support.small_llama import attend
from torchtitan_cp.parallel import float8

SHAPE = LlamaArgs(64, 2, 4, 2, 16, 96, vocab_size=61)
TOKENS = (torch.arange(4 * 32) * 7 % 61).view(4, 32)


def convert_emulated(model: nn.Module, recipe: str) -> None:
    """Convert to layers that compute the same values without the hardware."""

    def emulated(name: str) -> Float8LinearConfig:
        return dataclasses.replace(from_recipe_name(name), emulate=True)

    from_recipe_name = Float8LinearConfig.from_recipe_name
    with patch.object(float8, "_check_device"), patch.object(Float8LinearConfig, "from_recipe_name", emulated):
        float8.convert_linears(model, recipe, "cpu")


def make_model(recipe: str | None) -> Llama:
    torch.manual_seed(2)
    model = Llama(SHAPE, attend)
    model.set_rope([1.0] * 8, 1.0, torch.device("cpu"))
    if recipe:
        convert_emulated(model, recipe)
    return model


def run(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss, summed; its gradients are on the model."""
    logits = model(tokens, torch.arange(32), None)
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="sum")
    loss.backward()
    return loss.detach()
