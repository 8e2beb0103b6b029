"""Architectures the entry points handed over: the only way a model comes into this package."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.sections import Model


class Hub(Protocol):
    """An architecture's checkpoints in Hugging Face's format."""

    @property
    def names(self) -> Mapping[str, str]: ...
    @property
    def sizes(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]: ...
    @property
    def config(self) -> Callable[[Any], dict[str, Any]]: ...


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
    @property
    def hub(self) -> Hub | None: ...
    @property
    def lacks(self) -> Mapping[str, str]: ...


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


def check_support(config: Config, degrees: Any) -> None:
    """Refuse what the config asks for and its architecture lacks.

    Args:
        degrees: with `pp` and `tp`, of the mesh or of a stage.

    Raises:
        ConfigError: naming the key, and the architecture's reason.
    """
    for key, reason in architecture(config.model).lacks.items():
        section, name = key.split(".")
        plain = 1 if section == "parallel" else False
        if (getattr(degrees, name) if section == "parallel" else getattr(getattr(config, section), name)) != plain:
            raise ConfigError(
                f"{key} does not go with the architecture {config.model.architecture!r}: {reason}",
                fix=f"set {key} = {str(plain).lower()}, or use another model.architecture",
            )


def model_args_of(model: Model) -> Any:
    """The flavor's ModelArgs with [model] overrides applied; vocab_size may still be 0 (the tokenizer's).

    Raises:
        ConfigError: an unknown flavor or override, an override of the wrong type, sizes that do not fit, or that
            are not those of model.hub_checkpoint.
    """
    flavors = architecture(model).flavors
    if model.flavor not in flavors:
        raise ConfigError(f"model.flavor = {model.flavor!r} is not known", fix=f"use one of {', '.join(flavors)}")
    args = flavors[model.flavor]
    names = [entry.name for entry in dataclasses.fields(args)]
    for name, value in model.overrides.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise ConfigError(f"model.overrides.{name} is no size of {model.architecture}", fix=fix)
        wanted = type(getattr(args, name))
        wanted = list if wanted is tuple else wanted
        if type(value) is not wanted:
            raise ConfigError(f"model.overrides.{name} must be of type {wanted.__name__}, got {value!r}")
    overrides = {name: tuple(value) if type(value) is list else value for name, value in model.overrides.items()}
    args = dataclasses.replace(args, **overrides)
    if problem := args.problem():
        raise ConfigError(f"model {model.flavor} with its overrides: {problem}", fix="change model.overrides")
    return _as_in_hub(model, args) if model.hub_checkpoint else args


def hub_of(model: Model) -> Hub:
    """How the architecture looks in Hugging Face's format.

    Raises:
        ConfigError: it has no such format.
    """
    hub = architecture(model).hub
    if hub is None:
        raise ConfigError(
            f"the architecture {model.architecture!r} has no names in Hugging Face's format",
            fix="use another architecture, or add them as models/llama/hub.py has them",
        )
    return hub


def _as_in_hub(model: Model, args: Any) -> Any:
    """ModelArgs with the vocabulary of the hub checkpoint, whose every other size it must have."""
    path = Path(model.hub_checkpoint).expanduser() / "config.json"
    try:
        sizes = hub_of(model).sizes(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"model.hub_checkpoint: {path} cannot be read: {error.strerror}",
            fix="give a folder with config.json and *.safetensors, as `huggingface-cli download --local-dir` makes it",
        ) from None
    except KeyError as error:
        raise ConfigError(f"model.hub_checkpoint: {path} has no {error}", fix="give a complete config.json") from None
    except ValueError as error:
        raise ConfigError(f"model.hub_checkpoint: {path}: {error}", fix="use another checkpoint") from None
    if not args.vocab_size:
        args = dataclasses.replace(args, vocab_size=sizes["vocab_size"])
    # One window for all layers may be said in more ways than one.
    wanted = dataclasses.replace(args, **sizes)
    others = {name: size for name, size in sizes.items() if getattr(args, name) != size}
    if "windows" in others and wanted.layer_windows == args.layer_windows:
        del others["windows"]
    if others:
        differences = ", ".join(f"{name} {getattr(args, name)!r} and not {size!r}" for name, size in others.items())
        overrides = ", ".join(f"{name} = {_toml(size)}" for name, size in others.items())
        raise ConfigError(
            f"model.hub_checkpoint: the flavor {model.flavor} with its overrides has {differences}, as {path} says",
            fix=f"use the flavor of that checkpoint, or add model.overrides = {{{overrides}}}",
        )
    return args


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def with_vocabulary(args: Any, tokenizer_size: int) -> Any:
    """ModelArgs with room for the tokenizer's pieces.

    Raises:
        ConfigError: the flavor fixes a vocabulary smaller than the tokenizer's.
    """
    if args.vocab_size == 0:
        return dataclasses.replace(args, vocab_size=tokenizer_size)
    if args.vocab_size < tokenizer_size:
        raise ConfigError(
            f"the model has {args.vocab_size} embeddings and the tokenizer {tokenizer_size} pieces",
            fix="set model.overrides = {vocab_size = 0} to take the tokenizer's, or use another tokenizer",
        )
    return args
