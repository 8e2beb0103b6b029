"""Blocks that are compiled, buffers beside offloaded parameters, and the gradients of one rank."""

import pytest
import torch
from torch import Tensor, nn

from torchtitan_cp.config.training import Activation, Compile
from torchtitan_cp.parallel.apply import OneRankReduceScatter, move_buffers, wrap_blocks


class Windowed(nn.Module):
    """A block that is compiled anew for each window."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[self.window :].sum()


def test_buffers_move_and_parameters_stay() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    move_buffers(model, torch.device("meta"))
    assert all(buffer.is_meta for buffer in model.buffers())
    assert not any(parameter.is_meta for parameter in model.parameters())


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


def test_one_rank_reduces_gradients_in_the_buffer_that_they_were_copied_to() -> None:
    buffers = OneRankReduceScatter()
    size, options = (8,), {"dtype": torch.float32, "device": torch.device("cpu")}
    copied, reduced, of_next = (buffers.allocate(size, **options) for _ in range(3))
    assert reduced is copied
    assert of_next.data_ptr() != copied.data_ptr()
