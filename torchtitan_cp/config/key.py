"""What one key of the TOML file takes: its choices and bounds, stated at its field, and their checks."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from torchtitan_cp.config.errors import ConfigError


def key(
    default: Any,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    excluded: int | None = None,
    read_by: tuple[str, ...] = (),
) -> Any:
    """A key with the values it takes. The bounds of a list or table hold for each entry; every number is finite.

    Args:
        least, most: bounds that are allowed themselves; below: one that is not.
        excluded: a number between them that is not allowed.
        read_by: the kinds (of a source, of a RoPE) that read the key, if not all do.
    """
    bounds = {"least": least, "most": most, "below": below, "excluded": excluded}
    metadata = {"choices": choices, "read_by": read_by, **bounds}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_range(value: Any, metadata: Mapping[str, Any], where: str) -> None:
    """Refuse a value of the file outside the choices or bounds of its key.

    Args:
        metadata: of the key's field.
        where: file and dotted key.
    """
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    names = ("choices", "least", "most", "below", "excluded")
    choices, least, most, below, excluded = (metadata.get(name) for name in names)
    for entry in entries:
        wrong = fix = ""
        if choices and entry not in choices:
            wrong, fix = "is not known", "use one of " + ", ".join(choices)
        elif isinstance(entry, float) and not math.isfinite(entry):
            wrong, fix = "is not a finite number", "give a finite number"
        elif least is not None and entry < least:
            wrong, fix = "is too small", f"use at least {least:g}"
        elif most is not None and entry > most:
            wrong, fix = "is too large", f"use at most {most:g}"
        elif below is not None and entry >= below:
            wrong, fix = "is too large", f"use a number below {below:g}"
        elif excluded is not None and entry == excluded:
            wrong, fix = "is neither a number of ranks nor -1", "use 1 or more, or -1 for the remaining ranks"
        if wrong:
            raise ConfigError(f"{where} = {entry!r} {wrong}", fix=fix)


def check_read_keys(section: Any, selector: str, where: str) -> None:
    """Refuse a key that the chosen kind does not read, as it would be dropped silently.

    Args:
        section: whose keys say which kinds read them.
        selector: name of the key that chooses the kind.
        where: the dotted key of `section`.
    """
    kind = getattr(section, selector)
    for entry in dataclasses.fields(section):
        read_by = entry.metadata.get("read_by")
        if read_by and kind not in read_by and getattr(section, entry.name) != entry.default:
            raise ConfigError(
                f"{where}.{entry.name} does nothing with {selector} = {kind!r}",
                fix=f"remove it, or use {selector} = {' or '.join(map(repr, read_by))}",
            )
