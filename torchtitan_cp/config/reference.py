"""The table of sections and keys, made from the dataclasses: for `--help` and `docs/make_config_page.py`."""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from torchtitan_cp.config.sections import Config, Curriculum, Data, DataSource, Stage


class Key(NamedTuple):
    """One key of the TOML: dotted name, type, default as TOML, and meaning."""

    name: str
    type: str
    default: str
    help: str


def sections() -> Iterator[tuple[str, str, list[Key]]]:
    """Each section in the order of the file: its header, its purpose, its keys."""
    for name, kind in typing.get_type_hints(Config).items():
        tables = {f"[{name}]": kind}
        if kind is Data:
            tables["[[data.sources]]"] = DataSource
        elif kind is Curriculum:
            tables = {"[[curriculum.stages]]": Stage}
        for header, section in tables.items():
            yield header, section.__doc__.splitlines()[0], list(_keys(section))


def help_texts(section: Any) -> dict[str, str]:
    """The help text of each key, from the `Attributes:` of the section and the classes it extends."""
    docs = (inspect.cleandoc(base.__doc__ or "") for base in reversed(section.__mro__))
    entries = (entry for doc in docs for entry in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", doc, re.MULTILINE))
    return {name: " ".join(text.split()) for name, text in entries}


def _keys(section: Any, prefix: str = "") -> Iterator[Key]:
    texts, hints = help_texts(section), typing.get_type_hints(section)
    for entry in dataclasses.fields(section):
        kind = hints[entry.name]
        optional = typing.get_origin(kind) is types.UnionType
        kind = typing.get_args(kind)[0] if optional else kind
        if dataclasses.is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{entry.name}.")
            continue
        choices = entry.metadata.get("choices")
        help_text = texts[entry.name] + (f" ({' | '.join(choices)})" if choices else "")
        name = "list" if typing.get_origin(kind) is tuple else (typing.get_origin(kind) or kind).__name__
        default = {} if entry.default is dataclasses.MISSING else entry.default
        yield Key(prefix + entry.name, name, "" if default is None else json.dumps(default), help_text)


def as_text() -> str:
    """Every key as plain lines, for a terminal."""
    lines = []
    for header, about, keys in sections():
        entries = (f"  {key.name} = {key.default}".ljust(44) + f"  {key.help}" for key in keys)
        lines += [f"{header}  {about}", *entries, ""]
    return "\n".join(lines)
