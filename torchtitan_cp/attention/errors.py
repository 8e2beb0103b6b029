"""Errors of the attention library: wrong arguments, and what a strategy, kernel or layout cannot do."""

from collections.abc import Collection


class ContextParallelError(ValueError):
    """A plan or a call that is not possible.

    Attributes:
        message: what is wrong; fix: what would work, empty if nothing is known.
    """

    def __init__(self, message: str, *, fix: str = "") -> None:
        self.message, self.fix = message, fix
        super().__init__(f"{message}; {fix}" if fix else message)


class LayoutError(ContextParallelError):
    """A sequence length that the layout cannot divide."""


class PlanError(ContextParallelError):
    """A mask, strategy, kernel or call that is invalid or not supported."""


def check_name(kind: str, name: str, known: Collection[str], error: type[ContextParallelError] = PlanError) -> str:
    """Return `name`, or raise `error` with the known names."""
    if name not in known:
        raise error(f"{kind} {name!r} is not available", fix=f"use one of {', '.join(known)}")
    return name
