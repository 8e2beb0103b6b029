"""Architectures the entry points handed over: the only way a model comes into this package."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import nn

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.sections import Model


class Architecture(Protocol):
    """What the trainer asks of an architecture; `models/architecture.py` says what each part gives."""

    @property
    def name(self) -> str: ...
    @property
    def flavors(self) -> Mapping[str, Any]: ...
    @property
    def build(self) -> Callable[[Any, Any], nn.Module]: ...
    @property
    def sharding(self) -> Mapping[str, str]: ...


_ARCHITECTURES: dict[str, Architecture] = {}


def register(architectures: Iterable[Architecture]) -> None:
    """Make architectures known by their names."""
    _ARCHITECTURES.update({architecture.name: architecture for architecture in architectures})


def architecture(model: Model) -> Architecture:
    """The architecture that [model] names.

    Raises:
        ConfigError: it is not registered.
    """
    if model.architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ConfigError(f"model.architecture = {model.architecture!r} is not known", fix=f"use one of {known}")
    return _ARCHITECTURES[model.architecture]


def shape_of(model: Model) -> Any:
    """The flavor's shape with [model] overrides applied; vocab_size may still be 0 (the tokenizer's).

    Raises:
        ConfigError: an unknown flavor or override, an override of the wrong type, or sizes that do not fit.
    """
    flavors = architecture(model).flavors
    if model.flavor not in flavors:
        raise ConfigError(f"model.flavor = {model.flavor!r} is not known", fix=f"use one of {', '.join(flavors)}")
    shape = flavors[model.flavor]
    names = [entry.name for entry in dataclasses.fields(shape)]
    for name, value in model.overrides.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise ConfigError(f"model.overrides.{name} is no size of {model.architecture}", fix=fix)
        wanted = type(getattr(shape, name))
        wanted = list if wanted is tuple else wanted
        if type(value) is not wanted:
            raise ConfigError(f"model.overrides.{name} must be of type {wanted.__name__}, got {value!r}")
    overrides = {name: tuple(value) if type(value) is list else value for name, value in model.overrides.items()}
    shape = dataclasses.replace(shape, **overrides)
    if problem := shape.problem():
        raise ConfigError(f"model {model.flavor} with its overrides: {problem}", fix="change model.overrides")
    return shape


def with_vocabulary(shape: Any, tokenizer_size: int) -> Any:
    """The shape with room for the tokenizer's pieces.

    Raises:
        ConfigError: the flavor fixes a vocabulary smaller than the tokenizer's.
    """
    if shape.vocab_size == 0:
        return dataclasses.replace(shape, vocab_size=tokenizer_size)
    if shape.vocab_size < tokenizer_size:
        raise ConfigError(
            f"the model has {shape.vocab_size} embeddings and the tokenizer {tokenizer_size} pieces",
            fix="set model.overrides = {vocab_size = 0} to take the tokenizer's, or use another tokenizer",
        )
    return shape
