"""What the doctor refuses before it runs anything."""

from typing import Any, cast

import pytest
import torch
from torch import nn

from torchtitan_cp.attention.doctor import doctor
from torchtitan_cp.attention.errors import PlanError


@pytest.mark.parametrize("batch", [{}, {"tokens": torch.zeros(0, 8)}, {"tokens": torch.zeros(8)}])
def test_a_batch_without_tokens_is_refused(batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(PlanError, match=r"the batch holds no tokens; put them first, \[B, S\]"):
        doctor(nn.Identity(), cast(Any, None), batch)
