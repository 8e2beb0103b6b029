"""What torch hands to the two halves of an autograd function; torch has no type for it."""

from typing import Protocol

from torch import Tensor


class Context(Protocol):
    """Keeps tensors from forward to backward; functions that keep other values name them in a class of their own."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
