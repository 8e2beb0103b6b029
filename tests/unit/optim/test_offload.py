"""Optimizer state on the host."""

import logging
from typing import Any

import pytest
import torch

from tests.support.small_net import assert_same, small_net, train, weights
from torchtitan_cp.config.training import Optimizer, ParameterGroup
from torchtitan_cp.optim.build import build_optimizer
from torchtitan_cp.optim.offload import keep_state_on_host
from torchtitan_cp.optim.optimizers import OPTIMIZERS


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"name": "muon"},
        {"groups": (ParameterGroup("norm", 0.1, 0.2),)},
    ],
    ids=["adamw", "muon", "groups"],
)
def test_state_kept_on_the_host_changes_no_step_and_is_fetched_a_parameter_at_a_time(options: dict[str, Any]) -> None:
    model, twin = small_net(), small_net()
    optimizer, other = (build_optimizer(m, Optimizer(**options)) for m in (model, twin))
    taken: list[list[int]] = []
    optimizer.register_step_pre_hook(lambda *_: taken.append([len(g["params"]) for g in optimizer.param_groups]))
    keep_state_on_host(optimizer, OPTIMIZERS[options.get("name", "adamw")].parts)
    groups = optimizer.param_groups
    for _ in range(3):
        train(model, optimizer, 1)
        train(twin, other, 1)
        assert_same(weights(model), weights(twin), rtol=0)
    assert optimizer.param_groups is groups
    assert taken == [[1]] * 3 * len(weights(model))
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        for name, value in other.state[its].items():
            assert torch.equal(optimizer.state[mine][name], value), name


def test_offloading_says_that_it_is_inactive_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build_optimizer(small_net(), Optimizer(offload_state=True))
    assert "optimizer.offload_state is inactive" in caplog.text
