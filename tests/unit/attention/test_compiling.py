"""Functions of rows, compiled once for any number of rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchtitan_cp.attention import compiling
from torchtitan_cp.attention.compiling import compile_rows


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def test_a_function_of_rows_is_compiled_once_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiling, "compile_whole", lambda function: torch.compile(function, backend=counter))
    run = compile_rows(gated)
    for rows in (5, 0, 16, 1, 2, 31, 0, 5):
        given = [torch.randn(rows, 8, requires_grad=True) for _ in range(2)]
        want = gated(*given)
        got = run(*given)
        gradients = (torch.autograd.grad(out, given, torch.ones_like(out)) for out in (got, want))
        for one, other in zip([got, *next(gradients)], [want, *next(gradients)], strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1
    with torch.no_grad():
        for rows in (5, 1, 9):
            assert run(torch.ones(rows, 8), torch.ones(rows, 8)).shape == (rows, 8)
    assert counter.frame_count == 2, "another without gradients"
