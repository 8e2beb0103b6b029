"""Errors of the attention library: wrong arguments, and what a strategy, kernel or layout cannot do."""


class ContextParallelError(ValueError):
    """A plan or a call that is not possible. `fix` says what would work."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        self.message, self.fix = message, fix
        super().__init__(f"{message}; {fix}" if fix else message)


class LayoutError(ContextParallelError):
    """A sequence length that the layout cannot divide."""


class PlanError(ContextParallelError):
    """A mask, strategy, kernel or call that is invalid or not supported."""
