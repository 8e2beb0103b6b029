"""Faults made on purpose, for drills: detection, diagnosis and recovery treat them as real ones."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.sections import Inject

logger = logging.getLogger(__name__)

SPIKE = 1e4


class Injector:
    """Makes the fault of [health.inject] in the steps it names, and does nothing in the others. Collective to make.

    Args:
        settings: [health.inject].
        parts: the model's modules on this rank.
        vocabulary: V; ids from V on are not tokens.
        shares_batch_with: whether a rank reads the same tokens as this one.

    Attributes:
        name: name of the module that gets the fault; module: the module itself, None if this rank does not have it.

    Raises:
        ConfigError: on all ranks, if the rank does not have the module, or the module has no weight to corrupt.
    """

    def __init__(self, settings: Inject, parts: Any, vocabulary: int, shares_batch_with: Callable[[int], bool]) -> None:
        self.settings, self.vocabulary, self.shares_batch_with = settings, vocabulary, shares_batch_with
        # The last part may hold the embedding too, for the tied weight of its output, but only the first part runs it.
        modules: dict[str, nn.Module] = {}
        for part in parts:
            if part.is_first:
                modules["tok_embeddings"] = part.tok_embeddings
            for number, layer in part.layers.items():
                modules |= dict(layer.named_modules(prefix=f"layers.{number}"))
        in_block = ".".join(filter(None, ("layers", str(settings.layer), settings.module)))
        self.name = "tok_embeddings" if settings.where == "embedding" else in_block
        self.module = modules.get(self.name)
        if settings.step and settings.where != "data":
            if settings.where in ("gradient", "weight"):
                modules = {name: module for name, module in modules.items() if _weight_name(module)}
            known = [list(modules)]
            dist.broadcast_object_list(known, settings.rank)
            if self.name not in known[0]:
                raise ConfigError(
                    f"[health.inject]: rank {settings.rank} has no module {self.name} for where = {settings.where!r}; "
                    f"it has {', '.join(known[0])}",
                    fix="name a rank, layer and module that exist",
                )

    def is_due(self, step: int, *, again: bool = False) -> bool:
        """Whether the step gets the fault, in its first run or when it is run again."""
        settings = self.settings
        return 0 < settings.step <= step < settings.step + settings.steps and not (again and settings.transient)

    def fault(self, step: int, *, again: bool = False) -> AbstractContextManager[None]:
        """Make the fault in the modules that run within this context, if it is due in this step and on this rank."""
        settings, due = self.settings, self.is_due(step, again=again)
        if due and not again and dist.get_rank() == 0:
            logger.warning("FAULT INJECTED on purpose in step %d by [health.inject]: %s", step, asdict(settings))
        if not due or settings.rank != dist.get_rank() or settings.where == "data" or self.module is None:
            return nullcontext()
        # The hook of a whole block runs before its other hooks, which have to see the fault; the hook of a smaller
        # module runs after the hooks of tensor parallelism.
        whole_block = settings.where != "embedding" and not settings.module
        return fault_in(self.module, settings, prepend=whole_block)

    def corrupt(self, step: int, micro_batches: Sequence[Any], *, again: bool = False) -> tuple[Any, ...]:
        """The micro-batches of a step; if a fault with where = "data" is due, it is in the labels of the first.

        For NaN and infinity, one label is outside the vocabulary, which makes its loss infinite. For a spike, every
        label becomes another token.
        """
        settings, (first, *others) = self.settings, micro_batches
        if settings.where == "data" and self.is_due(step, again=again) and self.shares_batch_with(settings.rank):
            labels = first.labels.clone()
            if settings.kind == "spike":
                labels = torch.where(labels < 0, labels, (labels + self.vocabulary // 2) % self.vocabulary)
            else:
                labels[0, labels.shape[1] // 2] = self.vocabulary + 1
            first = replace(first, labels=labels)
        return first, *others


def _weight_name(module: nn.Module) -> str | None:
    """Name of the module's first parameter, not counting those of its children; None if it has none."""
    return next((name for name, _ in module.named_parameters(recurse=False)), None)


@contextmanager
def fault_in(module: nn.Module, settings: Inject, *, prepend: bool = False) -> Iterator[None]:
    """Corrupt the first output, gradient or weight of a module that the settings name.

    Args:
        prepend: run before the other hooks of the module.
    """
    weight_name = str(_weight_name(module))

    def corrupted(x: Tensor) -> Tensor:
        return corrupt_(x.clone(), settings.kind)

    def corrupt_output(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        hook.remove()
        return (corrupted(output[0]), *output[1:]) if isinstance(output, tuple) else corrupted(output)

    def corrupt_gradient(module: nn.Module, inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inputs
        hook.remove()
        if settings.where == "backward":
            # The gradient of a view comes from this module alone; that of the tensor also from the residual stream.
            x = inputs[0].view_as(inputs[0])
            inputs = (x, *inputs[1:])
        else:
            # During the forward this is the gathered weight, whose gradient is not yet summed over ranks.
            x = getattr(module, weight_name)
        hooks.enter_context(x.register_hook(corrupted))
        return inputs

    with ExitStack() as hooks:
        if settings.where == "weight":
            corrupt_(getattr(module, weight_name), settings.kind)
        elif settings.where in ("backward", "gradient"):
            hook = hooks.enter_context(module.register_forward_pre_hook(corrupt_gradient, prepend=prepend))
        else:
            hook = hooks.enter_context(module.register_forward_hook(corrupt_output, prepend=prepend))
        yield


@torch.no_grad()
def corrupt_(x: Tensor, kind: str) -> Tensor:
    """Make the middle value of a tensor (of this rank's shard) NaN or infinite, or all values large, in place."""
    local, tp_rank, tp_ranks = x, 0, 1
    if isinstance(x, DTensor):
        local = x.to_local()
        if x.device_mesh.ndim == 1 and x.placements[0].is_replicate():
            # Each tensor-parallel rank uses only its own share of the tokens of a replicated tensor.
            tp_rank, tp_ranks = x.device_mesh.get_local_rank(), x.device_mesh.size()
    if kind == "spike":
        local.mul_(SPIKE)
    elif local.numel():
        first, *others = (size // 2 for size in local.shape)
        if others:
            others[0] = local.shape[1] * (2 * tp_rank + 1) // (2 * tp_ranks)
        local[(first, *others)] = float(kind)
    return x
