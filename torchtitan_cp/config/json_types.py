"""Types of values that come from JSON files."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
JsonObject: TypeAlias = dict[str, Json]
