"""Blocks that are compiled."""

import pytest
import torch
from torch import Tensor, nn

from torchtitan_cp.config.training import Activation, Compile
from torchtitan_cp.parallel.blocks import wrap_blocks


class Windowed(nn.Module):
    """A block that is compiled anew for each window."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[self.window :].sum()


@pytest.mark.deep
def test_blocks_of_many_kinds_are_compiled_where_torch_would_stop_after_eight() -> None:
    model = nn.Module()
    model.layers = nn.ModuleDict({str(window): Windowed(window) for window in range(3)})
    wrap_blocks(model, Activation(), Compile(enable=True), "cpu")
    for rows in (20, 30, 40):  # the second makes the rows dynamic: 12 in all
        hidden = torch.ones(rows)
        for window, layer in enumerate(model.layers.values()):
            assert layer(hidden) == rows - window
            with torch.no_grad():
                assert layer(hidden) == rows - window
