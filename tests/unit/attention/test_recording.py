"""Recordings of a model's layers."""

from functools import partial

import torch
from torch import Tensor, nn

from torchtitan_cp.attention import AttentionMask, causal_conv, make_plan
from torchtitan_cp.attention.comparison import ModelRun, record_step
from torchtitan_cp.attention.recording import record_modules

S = 130
PLAN = make_plan(S, mask=AttentionMask(document_lengths=((50, 80),)))


class Convolution(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return causal_conv(x, torch.ones(3, 4), PLAN)


def test_a_recording_of_own_values_takes_a_convolution_for_its_input() -> None:
    model, x = Convolution(), torch.arange(3.0 * S).view(1, S, 3)
    run = ModelRun([model], lambda _: model(x).sum(), dict, lambda: lambda: 0)
    with torch.no_grad():
        trace = record_step(run, partial(record_modules, sequences=1, tokens=S, own_values=True))
    assert (trace.error, trace.loss) == ("", x.sum().item())
