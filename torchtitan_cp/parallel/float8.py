"""Matrix products of the blocks' linear layers in float8, by torchao; weights and gradients keep their dtypes."""

import logging
from types import ModuleType

import torch
from torch import nn

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.extras import import_extra

logger = logging.getLogger(__name__)

# Ada is the first architecture with float8 products, which need sizes divisible by 16.
CAPABILITY = (8, 9)
DIVISOR = 16


def convert_linears(model: nn.Module, recipe: str, device_type: str) -> None:
    """Replace the linear layers inside the blocks by ones that multiply in float8, in place.

    Args:
        model: on any device, not sharded yet.
        recipe: `tensorwise` or `rowwise`: one scale per tensor, or per row. Source: torchao.float8.

    Raises:
        ConfigError: torchao is missing, the device has no float8 products, or no layer has fitting sizes.
    """
    float8 = check_float8(recipe, device_type)
    settings = float8.Float8LinearConfig.from_recipe_name(recipe)
    # Not routers, whose choices turn on small differences, nor subclasses, whose own forward would be lost.
    modules = model.get_submodule("layers").named_modules()
    linears = [layer for name, layer in modules if type(layer) is nn.Linear and ".router." not in f"{name}."]
    fitting = [linear for linear in linears if not (linear.in_features % DIVISOR or linear.out_features % DIVISOR)]
    if not fitting:
        raise ConfigError(
            f"training.float8 = {recipe!r}: no linear layer has sizes divisible by {DIVISOR}", fix="leave it at 'none'"
        )
    float8.convert_to_float8_training(model, config=settings, module_filter_fn=lambda module, name: module in fitting)
    logger.info("float8, %s: %d of %d linear layers of the blocks", recipe, len(fitting), len(linears))


def check_float8(recipe: str, device_type: str) -> ModuleType:
    """Return torchao's float8, for a device that can use it.

    Raises:
        ConfigError: torchao is missing, or the device has no float8 products.
    """
    _check_device(device_type)
    return import_extra("torchao.float8", extra="float8", needed_by=f"training.float8 = {recipe!r}")


def _check_device(device_type: str) -> None:
    found = torch.cuda.get_device_capability() if device_type == "cuda" else None
    if found is None or found < CAPABILITY:
        has = f"has {found[0]}.{found[1]}" if found else "is none"
        raise ConfigError(
            f"training.float8 needs a CUDA device of compute capability 8.9 or newer, and this {device_type} {has}",
            fix="leave training.float8 at 'none' here",
        )
