"""torch.compile that counts its graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._dynamo.testing import CompileCounterWithBackend


@contextmanager
def counting_backend(name: str = "eager") -> Iterator[CompileCounterWithBackend]:
    """torch.compile that counts graphs and gives them to a backend; by default it runs them as they are."""
    torch._dynamo.reset()
    counter, compile_with = CompileCounterWithBackend(name), torch.compile
    with patch("torch.compile", lambda function, mode=None, **keys: compile_with(function, backend=counter, **keys)):
        yield counter
