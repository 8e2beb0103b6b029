"""Which weights of a model [lora] adapts, and which it trains whole; unlike the adapters, it imports no DTensor."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.contract import LanguageModel
from torchtitan_cp.config.training import Lora
from torchtitan_cp.parallel.nf4 import GROUP

ROUTER = ".router."


class LoraTargets(NamedTuple):
    """What [lora] chooses of a model, or of a part of one.

    Attributes:
        adapted: names of the linear layers that get an adapter.
        trained: names of the parameters that are trained whole.
        quantized: names of the linear layers whose weights are stored in NF4: those of the blocks that are frozen, but
            for routers and for weights that are no whole groups.
    """

    adapted: tuple[str, ...]
    trained: tuple[str, ...]
    quantized: tuple[str, ...] = ()

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters that are trained, in the model with adapters."""
        return [f"{name}.{matrix}" for name in self.adapted for matrix in ("lora_a", "lora_b")] + [*self.trained]


def find_targets(model: LanguageModel, lora: Lora) -> LoraTargets:
    """Apply the patterns of [lora] to the modules of a model, or of a part of it, without adapters."""
    whole = [module for name, module in model.named_modules() if _matches(name, lora.train)]
    trained = {parameter for module in whole for parameter in module.parameters(recurse=False)}
    linears = [name for name in _linear_layers(model) if model.get_submodule(name).weight not in trained]
    adapted = tuple(name for name in linears if not lora.targets or _matches(name, lora.targets))
    fitting = tuple(name for name in linears if model.get_parameter(f"{name}.weight").numel() % GROUP == 0)
    # A tied weight has two names, of which this is the first.
    trained_names = tuple(name for name, parameter in model.named_parameters() if parameter in trained)
    return LoraTargets(adapted, trained_names, fitting if lora.base == "nf4" else ())


class LoraCounts(NamedTuple):
    """Numbers that [lora] trains in a whole model, and that it stores in NF4.

    Attributes:
        adapters: in adapters.
        whole: in parameters that are trained whole.
        whole_linear: those in matrices that multiply each token; of experts, the ones that it is sent to.
        quantized: weights in NF4.
        forward_layers: layers before the first with anything trained; 0 if the embedding is.
    """

    adapters: int
    whole: int
    whole_linear: float
    quantized: int
    forward_layers: int


def count_trained(model: LanguageModel, lora: Lora, experts_share: float) -> LoraCounts:
    """Count what [lora] trains in a whole model without adapters.

    Args:
        experts_share: experts of a layer that a token is sent to, over all of them.
    """
    found, modules = find_targets(model, lora), dict(model.named_modules())
    adapters = sum(lora.rank * sum(modules[name].weight.shape) for name in found.adapted)
    trained = [model.get_parameter(name) for name in found.trained]
    matrices = {module.weight for module in modules.values() if isinstance(module, nn.Linear)}
    experts = {parameter for module in model.experts.values() for parameter in module.parameters()}
    linear = sum(p.numel() * (experts_share if p in experts else 1.0) for p in trained if p in matrices or p in experts)
    quantized = sum(model.get_parameter(f"{name}.weight").numel() for name in found.quantized)
    reached = {*trained, *(modules[name].weight for name in found.adapted)}
    blocks = [model.tok_embeddings, *model.layers.values()]
    first = next(number for number, block in enumerate([*blocks, model]) if not reached.isdisjoint(block.parameters()))
    return LoraCounts(adapters, sum(parameter.numel() for parameter in trained), linear, quantized, max(0, first - 1))


def check_targets(model: LanguageModel, lora: Lora) -> None:
    """Refuse a model without linear layers, and a pattern of [lora] that finds nothing, or what takes no adapter.

    Args:
        model: the whole one.

    Raises:
        ConfigError: naming the pattern, and what it found instead.
    """
    linears, modules = _linear_layers(model), [name for name, _ in model.named_modules()]
    experts = [name for name, module in model.named_modules() if module in model.experts.values()]
    if not linears and (lora.targets or not lora.train):
        raise ConfigError(
            "[lora]: the blocks of this model have no linear layer that takes an adapter",
            fix="name modules to train whole in lora.train, or leave out [lora]",
        )
    for index, pattern in enumerate(lora.targets):
        if any(re.search(pattern, name) for name in linears):
            continue
        fused = [name for name in experts if re.search(pattern, name)]
        reason = f"{fused[0]} has all its experts in one tensor, which takes no adapter" if fused else ""
        other = next((name for name in modules if re.search(pattern, name)), "")
        reason = reason or (f"{other} is none" if other else f"they are like {linears[0]} and {linears[-1]}")
        raise ConfigError(
            f"lora.targets[{index}] = {pattern!r} finds no linear layer of the blocks: {reason}",
            fix=f"name linear layers, or train the module whole: lora.train = [{pattern!r}]",
        )
    for index, pattern in enumerate(lora.train):
        with_weights = [name for name, module in model.named_modules() if module._parameters]
        if not any(re.search(pattern, name) for name in with_weights):
            raise ConfigError(
                f"lora.train[{index}] = {pattern!r} finds no module that has weights of its own",
                fix=f"names are like {with_weights[0]}, {with_weights[len(with_weights) // 2]}, {with_weights[-1]}",
            )
    if lora.base == "nf4" and not find_targets(model, lora).quantized:
        raise ConfigError(
            f"lora.base = 'nf4': no frozen linear layer of the blocks has a multiple of {GROUP:,} weights",
            fix="leave it at 'bfloat16'",
        )


def check_pipeline_targets(trained_names: Sequence[str], spans: Sequence[tuple[int, int]]) -> None:
    """Refuse a pipeline stage without trained weights, whose backward would have nothing to do.

    Args:
        trained_names: of all trained parameters of the whole model.
        spans: layers [first, stop) of each pipeline stage.

    Raises:
        ConfigError: naming the pipeline stage's layers.
    """
    layers = {int(number) for name in trained_names for number in re.findall(r"^layers\.(\d+)\.", name)}
    for first, stop in spans:
        if layers.isdisjoint(range(first, stop)):
            raise ConfigError(
                f"[lora] trains nothing in layers {first} to {stop - 1}, which are a pipeline stage",
                fix="widen lora.targets, or lower parallel.pp",
            )


def _linear_layers(model: LanguageModel) -> list[str]:
    """Names of the linear layers of the blocks, without routers and subclasses."""
    in_blocks = {module for layer in model.layers.values() for module in layer.modules()}
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and module in in_blocks]
    return [name for name in linears if ROUTER not in f".{name}."]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
