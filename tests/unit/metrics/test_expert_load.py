"""How tokens are spread over experts, in the fields of a record."""

import math

import numpy as np
import pytest
import torch

from torchtitan_cp.metrics.expert_load import expert_fields, expert_loads


def test_fields_are_of_layers_with_experts_and_idle_ones_are_a_share_of_all() -> None:
    counts = torch.tensor([[0, 0, 0, 0], [8, 8, 8, 8], [0, 0, 31, 1], [0, 10, 10, 12]]).double()
    entropy = torch.tensor([0.0, 16 * math.log(2), 4.0, 8.0]).double()
    found = expert_fields(counts, entropy, tokens=16)
    assert found == {
        "expert_load": {"1": 1.0, "2": 31 / 8, "3": 1.5},
        "router_entropy": {"1": pytest.approx(math.log(2)), "2": 0.25, "3": 0.5},
        "idle_experts": 3 / 12,
    }


def test_the_mean_load_of_a_layer_is_one() -> None:
    counts = torch.randint(1, 1000, (3, 7), generator=torch.Generator().manual_seed(1)).double()
    counts[1] = 0
    loads = expert_loads(counts)
    np.testing.assert_allclose(loads.mean(1), [1.0, np.nan, 1.0])
    np.testing.assert_allclose(loads[2, 3] / loads[2, 5], counts[2, 3] / counts[2, 5])
