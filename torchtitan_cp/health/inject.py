"""Faults made on purpose, for drills: the same detection, replay and ladder answer them as answer real ones."""

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.sections import Inject
from torchtitan_cp.health.trace import modules_that_run

logger = logging.getLogger(__name__)

SPIKE = 1e4


class Injector:
    """Strikes one rank in the steps that [health.inject] names, and is nothing at all in the others. Collective.

    Args:
        settings: [health.inject].
        parts: of this rank.
        rank: this one.
        ranks: of the job.
        vocabulary: V; ids from it on are no tokens.

    Raises:
        ConfigError: on all ranks, if the rank it names does not exist or does not have the module.
    """

    def __init__(self, settings: Inject, parts: Iterable[nn.Module], rank: int, ranks: int, vocabulary: int) -> None:
        self.settings, self.rank, self.vocabulary = settings, rank, vocabulary
        self.modules = modules_that_run(parts)
        self.strikes_here = settings.step > 0 and rank == settings.rank
        if settings.step:
            problems: list[Any] = [None] * ranks
            dist.all_gather_object(problems, self._problem() if self.strikes_here else None)
            if settings.rank >= ranks:
                problems.append(f"there is no rank {settings.rank} among {ranks}")
            for problem in filter(None, problems):
                raise ConfigError(f"[health.inject]: {problem}", fix="name a rank, layer and module that exist")

    @property
    def module(self) -> str:
        """Name of the module that is struck."""
        settings = self.settings
        if settings.where == "embedding":
            return "tok_embeddings"
        return ".".join(filter(None, ("layers", str(settings.layer), settings.module)))

    def _problem(self) -> str | None:
        """Why this rank cannot be struck, if it cannot."""
        where = self.settings.where
        if where == "data":
            return None
        if self.module not in self.modules:
            known = ", ".join(name for name in self.modules if name)
            return f"rank {self.rank} has no module {self.module}; it has {known}"
        if where in ("gradient", "weight") and self._weight() is None:
            return f"{self.module} has no weight of its own"
        return None

    def _weight(self) -> str | None:
        """Name of the module's own parameter that is struck."""
        return next((name for name, _ in self.modules[self.module].named_parameters(recurse=False)), None)

    def due(self, step: int) -> bool:
        """Whether a step is struck."""
        settings = self.settings
        return 0 < settings.step <= step < settings.step + settings.steps

    @contextmanager
    def armed(self, step: int, *, again: bool = False) -> Iterator[None]:
        """Strike what runs within, if the step is due and the rank this one.

        Args:
            again: the step is run a second time.
        """
        settings = self.settings
        if not self.due(step) or (again and settings.transient):
            yield
            return
        if self.rank == 0 and not again:
            logger.warning(
                "FAULT INJECTED on purpose in step %d by [health.inject]: %s", step, dataclasses.asdict(settings)
            )
        strike = Strike(settings.kind)
        if self.strikes_here and settings.where != "data":
            # A whole block is struck before its other hooks, which are to see it; of others, after those of tensor
            # parallelism.
            strike.at(
                self.modules[self.module],
                settings.where,
                self._weight(),
                prepend=self.module.startswith("layers") and not settings.module,
            )
        try:
            yield
        finally:
            strike.end()

    def corrupt(self, step: int, labels: Tensor, *, again: bool = False) -> Tensor:
        """The labels `[B, s]` of a step's first micro-batch, with a fault where = data in them if the step is due.

        Every rank that reads these tokens is to call. A NaN or infinity is one label that is no token, which makes its
        loss infinite; a spike makes every label another token.
        """
        settings = self.settings
        if settings.where != "data" or not self.due(step) or (again and settings.transient):
            return labels
        labels = labels.clone()
        if settings.kind == "spike":
            return torch.where(labels < 0, labels, (labels + self.vocabulary // 2) % self.vocabulary)
        labels[0, labels.shape[1] // 2] = self.vocabulary + 1
        return labels


class Strike:
    """One fault in one run of a step: the first value that passes the place is spoiled.

    Args:
        kind: nan, inf or spike.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.waiting = kind, True
        self.handles: list[Any] = []

    def at(self, module: nn.Module, where: str, weight: str | None, *, prepend: bool) -> None:
        """Lie in wait at a module, before its other hooks or after them."""
        if where == "weight":
            corrupt_(getattr(module, str(weight)), self.kind)
        elif where == "backward":
            self.handles.append(module.register_forward_pre_hook(self._corrupt_input_gradient, prepend=prepend))
        elif where == "gradient":
            self.handles.append(module.register_forward_pre_hook(partial(self._corrupt_weight_gradient, str(weight))))
        else:
            self.handles.append(module.register_forward_hook(self._corrupt_output, prepend=prepend))

    def end(self) -> None:
        """Wait no longer."""
        for handle in self.handles:
            handle.remove()

    def _first(self) -> bool:
        first, self.waiting = self.waiting, False
        return first

    def _corrupt_output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not self._first():
            return output
        return (self._corrupted(output[0]), *output[1:]) if isinstance(output, tuple) else self._corrupted(output)

    def _corrupt_input_gradient(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and self._first():
            self.handles.append(inputs[0].register_hook(self._corrupted))

    def _corrupt_weight_gradient(self, weight: str, module: nn.Module, inputs: Any) -> None:
        # Within the forward it is the gathered weight, whose gradient no other rank has touched yet.
        if torch.is_grad_enabled() and self._first():
            self.handles.append(getattr(module, weight).register_hook(self._corrupted))

    def _corrupted(self, x: Tensor) -> Tensor:
        copy = x.clone()
        corrupt_(copy, self.kind)
        return copy


@torch.no_grad()
def corrupt_(x: Tensor, kind: str) -> None:
    """Make the middle value of a tensor (of this rank's part) NaN or infinite, or all of them large, in place."""
    own, place, ranks = x, 0, 1
    if isinstance(x, DTensor):
        own = x.to_local()
        if x.device_mesh.ndim == 1 and x.placements[0].is_replicate():
            # Of what tensor-parallel ranks have alike each goes on with its share of the tokens.
            place, ranks = x.device_mesh.get_local_rank(), x.device_mesh.size()
    if kind == "spike":
        own.mul_(SPIKE)
    elif own.numel():
        first, *others = (size // 2 for size in own.shape)
        if others:
            others[0] = own.shape[1] * (2 * place + 1) // (2 * ranks)
        own[(first, *others)] = float(kind)
