"""The doctor's report of traces that were made by hand."""

import torch
from torch import nn

from torchtitan_cp.attention import make_plan
from torchtitan_cp.attention.doctor import _Comparison
from torchtitan_cp.attention.recording import Trace


def test_counts_that_differ_by_rounding_are_no_fault() -> None:
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
    assert f"{line}\n" in report.text
    assert report.text.endswith("safe: nothing differs")
