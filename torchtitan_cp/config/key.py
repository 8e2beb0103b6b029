"""What one key of the TOML file takes: its choices and bounds, stated at its field, and their checks."""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torchtitan_cp.config.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def key(
    default: T,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    excluded: int | None = None,
    read_by: tuple[str, ...] = (),
) -> T:
    """A key with the values it takes. The bounds of a list or table hold for each entry; every number is finite.

    Args:
        least, most: inclusive bounds.
        below: an exclusive upper bound.
        excluded: a number within the bounds that is not allowed.
        read_by: the kinds (of a source, of a RoPE) that read the key; empty: all do.
    """
    bounds = {"least": least, "most": most, "below": below, "excluded": excluded}
    metadata = {"choices": choices, "read_by": read_by, **bounds}
    if isinstance(default, dict):
        return cast(T, field(default_factory=dict, metadata=metadata))
    return field(default=default, metadata=metadata)


# For each bound: the comparison that must hold, what is wrong with a value where it does not, and the fix.
BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str, str]] = {
    "least": (operator.ge, "is too small", "use at least {:g}"),
    "most": (operator.le, "is too large", "use at most {:g}"),
    "below": (operator.lt, "is too large", "use a number below {:g}"),
    "excluded": (operator.ne, "is neither a number of ranks nor -1", "use 1 or more, or -1 for the remaining ranks"),
}


def check_range(value: object, metadata: Mapping[str, Any], where: str) -> None:
    """Refuse a value of the file outside the choices or bounds of its key.

    Args:
        metadata: what `key` has stored in the field.
        where: file and dotted key.
    """
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    choices = metadata.get("choices")
    for entry in entries:
        if choices and entry not in choices:
            raise ConfigError(f"{where} = {entry!r} is not known", fix="use one of " + ", ".join(choices))
        if isinstance(entry, float) and not math.isfinite(entry):
            raise ConfigError(f"{where} = {entry!r} is not a finite number", fix="give a finite number")
        for name, (holds, wrong, fix) in BOUNDS.items():
            bound = metadata.get(name)
            if bound is not None and not holds(entry, bound):
                raise ConfigError(f"{where} = {entry!r} {wrong}", fix=fix.format(bound))


def check_read_keys(section: "DataclassInstance", selector: str, where: str) -> None:
    """Refuse a key that the chosen kind would silently ignore.

    Args:
        section: its fields say which kinds read them.
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
