"""The memory-efficient kernel: how the rows lie that its operator is given."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan_cp.attention.kernels import ScoreMod, efficient
from torchtitan_cp.attention.tiles import FULL


def test_the_efficient_kernel_gets_rows_of_out_that_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no other stride of them; all_gather passes slices of the heads."""
    strides = []

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, *_: Any, **__: Any) -> Any:
        strides.append(out.stride())
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None

    monkeypatch.setattr(efficient, "_BACKWARD", backward)
    whole = torch.randn(1, 32, 4, 8)
    q = out = whole[:, :, 1:3]
    efficient.backward(out, q, q, q, out, torch.zeros(1, 32, 2), FULL, ScoreMod(1.0))
    [(_, _, row, _)] = strides
    assert row == 2 * 8
