"""The doctor's report of traces that were made by hand."""

from typing import Any, cast

import pytest
import torch
from torch import nn

from torchtitan_cp.attention import make_plan
from torchtitan_cp.attention.doctor import _Comparison, doctor
from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.recording import Trace


def test_counts_that_differ_by_rounding_come_with_their_bound() -> None:
    base, change = torch.ones(1, 8, 8), torch.zeros(1, 8, 8)
    change[:, 3:] = 1e-3
    nearly = change.clone()
    change[:, 7], nearly[:, 7] = 5.5e-6, 4.5e-6
    event = ("layer", "out")
    same = Trace(events={event: base})
    traces = {name: same for name in ("plain", "ranks", "ranks, own values", "attend", "attend, changed")}
    traces |= {"plain, 3": Trace(events={event: base + change}), "ranks, 3": Trace(events={event: base + nearly})}
    report = _Comparison(make_plan(8), nn.ModuleDict({"layer": nn.Identity()}), traces, [3], {}).report()
    line = "token 3 changed: with it 5 positions from 3 to 7 on one process, 4 positions from 3 to 6 on the ranks"
    assert f"{line} (a position counts if it changes by 5e-06 of the largest number)\n" in report.text
    assert report.text.endswith("safe: nothing differs")
    traces["ranks, 3"] = traces["plain, 3"]
    assert "counts" not in _Comparison(make_plan(8), nn.ModuleDict(), traces, [3], {}).report().text


@pytest.mark.parametrize("batch", [{}, {"tokens": torch.zeros(0, 8)}, {"tokens": torch.zeros(8)}])
def test_a_batch_without_tokens_is_refused(batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(PlanError, match=r"the batch holds no tokens; put them first, \[B, S\]"):
        doctor(nn.Identity(), cast(Any, None), batch)
