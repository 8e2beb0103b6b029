"""The table of sections and keys, made from the dataclasses: for `--help` and `docs/make_config_page.py`."""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_cp.config.data import Data, DataSource, SourceKeys
from torchtitan_cp.config.sections import Config, Curriculum, Stage

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# What most people set, in the order in which they come to it. `--help` and docs/config.md begin with these.
FIRST = (
    *("job.dump_folder", "model.architecture", "model.flavor", "model.hub_checkpoint"),
    *("tokenizer.kind", "tokenizer.path", "data.source", "data.path", "data.messages_field", "data.mixture"),
    *("data.packing", "data.document_mask", "curriculum.stages.seq_len", "curriculum.stages.steps"),
    *("curriculum.stages.global_batch_tokens", "curriculum.stages.rope.theta", "curriculum.stages.cp"),
    *("training.compute_dtype", "training.micro_batch_sequences", "optimizer.lr", "lr_scheduler.warmup_steps"),
    *("parallel.cp", "parallel.tp", "context_parallel.strategy", "activation.checkpoint", "activation.offload"),
    *("compile.enable", "checkpoint.interval", "checkpoint.keep", "metrics.wandb"),
)


class Key(NamedTuple):
    """One key of the TOML: dotted name, type, default as TOML, and meaning."""

    name: str
    type: str
    default: str
    help: str


def sections() -> Iterator[tuple[str, str, list[Key]]]:
    """Each section in the order of the file: its header, its purpose, its keys."""
    for name, hint in typing.get_type_hints(Config).items():
        kind = _without_none(hint)
        tables = {f"[{name}]": kind}
        if kind is Data:
            tables["[data] for one source, or [[data.sources]] for several"] = DataSource
        elif kind is Curriculum:
            tables = {"[[curriculum.stages]]": Stage}
        of_source = {entry.name for entry in dataclasses.fields(SourceKeys)} if kind is Data else set()
        for header, section in tables.items():
            keys = (key for key in _keys(section) if section is DataSource or key.name not in of_source)
            yield header, section.__doc__.splitlines()[0], list(keys)


def first_keys() -> list[Key]:
    """The keys that most people set, with their whole dotted names."""
    by_name = {f"{section_name(header)}.{key.name}": key for header, _, keys in sections() for key in keys}
    return [by_name[name]._replace(name=name) for name in FIRST]


def section_name(header: str) -> str:
    """`data` of `[data]`, and of the heading for sources; `curriculum.stages` of `[[curriculum.stages]]`."""
    return re.sub(r"\].*", "", header).lstrip("[")


def help_texts(section: type) -> dict[str, str]:
    """The help text of each key, from the `Attributes:` of the section and the classes it extends."""
    docs = (inspect.cleandoc(base.__doc__ or "") for base in reversed(section.__mro__))
    entries = (entry for doc in docs for entry in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", doc, re.MULTILINE))
    return {name: " ".join(text.split()) for name, text in entries}


def _keys(section: "type[DataclassInstance]", prefix: str = "") -> Iterator[Key]:
    texts, hints = help_texts(section), typing.get_type_hints(section)
    for entry in dataclasses.fields(section):
        kind = _without_none(hints[entry.name])
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{entry.name}.")
            continue
        choices = entry.metadata.get("choices")
        help_text = texts[entry.name] + (f" ({' | '.join(choices)})" if choices else "")
        name = "list" if typing.get_origin(kind) is tuple else (typing.get_origin(kind) or kind).__name__
        default = {} if entry.default is dataclasses.MISSING else entry.default
        yield Key(prefix + entry.name, name, "" if default is None else json.dumps(default), help_text)


def _without_none(kind: Any) -> Any:
    """The type of a key or section that may be absent; other types as they are."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is types.UnionType else kind


def as_text() -> str:
    """Every key as plain lines, for a terminal; those that most people set come first."""

    def line(key: Key) -> str:
        return f"  {key.name} = {key.default}".ljust(44) + f"  {key.help}"

    lines = ["What most people set", *map(line, first_keys()), "", "Every key", ""]
    for header, about, keys in sections():
        lines += [f"{header}  {about}", *map(line, keys), ""]
    return "\n".join(lines)
