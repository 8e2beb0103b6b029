"""TOML and command-line overrides into a `Config`, and a `Config` back into TOML."""

import dataclasses
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import tomli
import tomli_w

from torchtitan_cp.config.errors import ConfigError, check_utf8
from torchtitan_cp.config.key import check_range
from torchtitan_cp.config.retired import read_retired_keys
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.sections import Config

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Section = TypeVar("Section")
OVERRIDE = re.compile(r"--([A-Za-z_]\w*(?:[.\[][\w.\[\]-]*)?)=(.*)", re.DOTALL)
STAGE_END = re.compile(r"--curriculum\.stages(?:\.|\[)(\d+)\]?\.(steps|tokens|until)(?:=|\.)")
# For each type of a key: what the value must be, and how to write one.
TOML_TYPES: dict[object, tuple[str, str]] = {
    int: ("an integer", "write digits alone, e.g. 8"),
    float: ("a number", "write it without quotes, e.g. 0.5"),
    bool: ("true or false", "write true or false, without quotes"),
    str: ("a string", 'write it in quotes, e.g. "text"; on a command line \'--section.key="text"\''),
    dict: ("a table", "write it in braces, e.g. {name = 1}"),
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `--section.key=value` overrides, and type every value.

    Args:
        path: the TOML file.
        overrides: as typed on the command line; values are TOML (a bare word is a string), stages are
            addressed by index: `--curriculum.stages[0].steps=10`.

    Raises:
        ConfigError: a missing file, a syntax error (file and line), an unknown key (with the nearest known
            one), a wrong type, a value outside its choices or bounds, or overrides that empty what the file says the
            model is.
    """
    table = read_toml(Path(path))
    named = _keys_that_name_a_model(table)
    for override in overrides:
        apply_override(table, override)
    _drop_replaced_ends(table, overrides)
    read_retired_keys(table, str(path))
    config = build(Config, table, where="", file=str(path))
    if named and not _keys_that_name_a_model(table):
        raise ConfigError(
            f"{path}: after the overrides nothing says which model is meant; the file has model.{named[0]}",
            fix="leave it, with --model.load_weights=false for fresh weights of other sizes (model.overrides), or name "
            "another model, e.g. --model.flavor=debug",
        )
    dump_folder = os.path.expanduser(config.job.dump_folder)
    check_utf8(dump_folder, "job.dump_folder")
    return config.with_keys(job={"dump_folder": dump_folder})


def _keys_that_name_a_model(table: dict[str, object]) -> list[str]:
    """Which keys of [model] say what the model is. Without any it is the debug flavor."""
    model = table.get("model")
    return [
        key
        for key in ("hub_checkpoint", "config", "checkpoint", "flavor")
        if isinstance(model, dict) and model.get(key)
    ]


def read_toml(path: Path) -> dict[str, object]:
    """The file as plain tables; errors name the file and the line."""
    try:
        return tomli.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", fix="give an existing file, e.g. train_configs/quickstart.toml"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", fix="give a TOML file saved as UTF-8"
        ) from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}",
            fix="the file must be TOML: [section] lines, and key = value with strings in quotes, true and false in "
            "small letters",
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}", fix="give a smaller number, or nest lists less deeply") from None


def apply_override(table: dict[str, object], override: str) -> None:
    """Put one `--section.key=value` into the tables, in place."""
    match = OVERRIDE.fullmatch(override)
    if not match:
        raise ConfigError(f"cannot read the argument {override!r}", fix="write --section.key=value")
    check_utf8(match[2], f"--{match[1]}")
    *parents, last = re.findall(r"[^.\[\]]+", match[1])
    node: object = table
    for step in parents:
        if isinstance(node, dict):
            node = node.setdefault(step, {})
        else:
            entries, index = _entry(node, step, override)
            node = entries[index]
    try:
        [value] = tomli.loads(f"value = {match[2]}").values()  # more of them: a text of several lines
    except (ValueError, RecursionError):  # no TOML, or a number or nesting beyond Python's limits
        value = {"True": True, "False": False}.get(match[2], match[2])  # as Python writes them
    if isinstance(node, dict):
        node[last] = value
    else:
        entries, index = _entry(node, last, override)
        entries[index] = value


def _drop_replaced_ends(table: dict[str, object], overrides: Sequence[str]) -> None:
    """Remove what the file says of a stage's end where an override gives its steps, tokens or until instead."""
    named = [STAGE_END.match(override) for override in overrides]
    given = {(int(match[1]), match[2]) for match in named if match}
    curriculum = table.get("curriculum")
    stages = curriculum.get("stages") if isinstance(curriculum, dict) else None
    for index, stage in enumerate(stages if isinstance(stages, list) else ()):
        named_here = {key for number, key in given if number == index}
        for key in {"steps", "tokens", "until"} - named_here if named_here else ():
            stage.pop(key, None)


def _entry(node: object, step: str, override: str) -> tuple[list[object], int]:
    """A list, and the index of one of its entries."""
    if isinstance(node, list) and step.isdigit() and int(step) < len(node):
        return node, int(step)
    size = f"a list of {len(node)}" if isinstance(node, list) else f"the value {node!r}"
    raise ConfigError(f"{override}: [{step}] does not exist in {size}", fix="count from 0")


def build(kind: type[Section], table: object, *, where: str, file: str) -> Section:
    """A section, or another dataclass, from its table.

    Raises:
        ConfigError: naming `file` and the dotted key `where`.
    """
    return cast(Section, _convert(kind, table, where=where, file=file))


def _convert(kind: object, value: object, *, where: str, file: str) -> object:
    """A value of the TOML as `kind`, a section or the type of a key."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _build_section(kind, value, where=where, file=file)
    origin, items = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return _convert(items[0], value, where=where, file=file)
    if origin is tuple:
        if not isinstance(value, list):
            fix = f"write it as [[{where}]] tables" if dataclasses.is_dataclass(items[0]) else "write it in brackets"
            raise ConfigError(f"{file}: {where} must be a list, got {value!r}", fix=fix)
        return tuple(_convert(items[0], entry, where=f"{where}[{i}]", file=file) for i, entry in enumerate(value))
    if origin is dict and isinstance(value, dict) and items[1] not in (Any, object):
        return {name: _convert(items[1], entry, where=f"{where}.{name}", file=file) for name, entry in value.items()}
    plain = origin or kind
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{file}: {where} is beyond TOML's integers of 64 bits", fix="give a smaller number")
    if type(value) is str and "\0" in value:
        raise ConfigError(f"{file}: {where} holds a NUL character", fix="leave it out")
    if plain is float and type(value) is int:
        return float(value)
    if plain is str and type(value) is float and not math.isfinite(value):
        return str(value)  # TOML takes nan and inf without quotes, as in --data.text_field=nan, for numbers
    if type(value) is not plain:
        wanted, fix = TOML_TYPES[plain]
        raise ConfigError(f"{file}: {where} must be {wanted}, got {value!r}", fix=fix)
    return value


def _build_section(kind: "type[DataclassInstance]", table: object, *, where: str, file: str) -> object:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {where} must be a table, got {table!r}", fix=f"write [{where}] and its keys below")
    hints, fields = typing.get_type_hints(kind), {entry.name: entry for entry in dataclasses.fields(kind)}
    values = {}
    for name, value in table.items():
        dotted = f"{where}.{name}" if where else name
        if name not in fields:
            # A key without its section, as in --lr=1e-4.
            near = [] if where else [f"{section}.{name}" for section in fields if name in _keys_of(hints[section])]
            near = near or difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            known = f"did you mean {' or '.join(near)}?" if near else "known here: " + ", ".join(sorted(fields))
            raise ConfigError(f"{file}: unknown {'key' if where else 'section'} {dotted}", fix=known)
        values[name] = _convert(hints[name], value, where=dotted, file=file)
        check_range(values[name], fields[name].metadata, f"{file}: {dotted}")
    section = kind(**values)
    if kind is Rope:
        vars(section)["omitted"] = tuple(name for name in fields if name not in values)
    return section


def _keys_of(kind: object) -> list[str]:
    """The keys of a section; none of what is no section."""
    kinds = [entry for entry in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(entry)]
    return [entry.name for entry in dataclasses.fields(kinds[0])] if kinds else []


def to_toml(config: Config) -> str:
    """The resolved config as TOML, without unset keys (TOML has no null). Reading it back gives the same config."""
    return tomli_w.dumps(dataclasses.asdict(config, dict_factory=lambda keys: {k: v for k, v in keys if v is not None}))
