"""The doctor's report of traces that were made by hand."""

import torch
from torch import nn

from torchtitan_cp.attention import make_plan
from torchtitan_cp.attention.faults import Findings
from torchtitan_cp.attention.recording import ModuleTrace


def test_counts_that_differ_by_rounding_come_with_their_bound() -> None:
    base, change = torch.ones(1, 8, 8), torch.zeros(1, 8, 8)
    change[:, 3:] = 1e-3
    nearly = change.clone()
    change[:, 7], nearly[:, 7] = 5.5e-6, 4.5e-6
    event = ("layer", "out")
    same = ModuleTrace(events={event: base})
    traces = {name: same for name in ("plain", "ranks", "ranks, own values", "attend", "attend, changed")}
    traces |= {
        "plain, 3": ModuleTrace(events={event: base + change}),
        "ranks, 3": ModuleTrace(events={event: base + nearly}),
    }
    report = Findings(make_plan(8), nn.ModuleDict({"layer": nn.Identity()}), traces, [3]).report()
    line = "token 3 changed: with it 5 positions from 3 to 7 on one process, 4 positions from 3 to 6 on the ranks"
    assert f"{line} (a position counts if it changes by 5e-06 of the largest number)\n" in report.text
    assert report.text.endswith("safe: nothing differs")
    traces["ranks, 3"] = traces["plain, 3"]
    assert "counts" not in Findings(make_plan(8), nn.ModuleDict(), traces, [3]).report().text
