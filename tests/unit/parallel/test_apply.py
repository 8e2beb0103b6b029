"""Buffers beside offloaded parameters, and the gradients of one rank."""

import torch
from torch import nn

from torchtitan_cp.parallel.apply import OneRankReduceScatter, move_buffers


def test_buffers_move_and_parameters_stay() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    move_buffers(model, torch.device("meta"))
    assert all(buffer.is_meta for buffer in model.buffers())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_one_rank_reduces_gradients_in_the_buffer_that_they_were_copied_to() -> None:
    buffers = OneRankReduceScatter()
    size, options = (8,), {"dtype": torch.float32, "device": torch.device("cpu")}
    copied, reduced, of_next = (buffers.allocate(size, **options) for _ in range(3))
    assert reduced is copied
    assert of_next.data_ptr() != copied.data_ptr()
