"""Errors of the attention library: wrong arguments, and what a strategy, kernel or layout cannot do."""


class ContextParallelError(ValueError):
    """A plan or a call that cannot be carried out. `fix` says what would work."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        self.message, self.fix = message, fix
        super().__init__(f"{message}; {fix}" if fix else message)


class LayoutError(ContextParallelError):
    """A sequence that cannot be cut as asked."""


class PlanError(ContextParallelError):
    """A mask, strategy or kernel that cannot do what is asked of it."""
