"""Experts without tokens are named once, whatever the interval at which somebody looks."""

import pytest
import torch
from torch import Tensor

from torchtitan_cp.health.idle_experts import MAX_NAMED, IdleExperts


def steps(text: str) -> list[Tensor]:
    """Counts of steps, `[3 layers, 2 experts]`: expert 1 of layer 2 has a token where the text has an x."""
    return [torch.tensor([[0, 0], [3, 5], [8 - (letter == "x"), letter == "x"]]).double() for letter in text]


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
def test_an_expert_is_named_once_each_time_it_becomes_idle(interval: int) -> None:
    idle, named = IdleExperts(3), []
    for number, counts in enumerate(steps("x...........x..x...xxx......"), start=1):
        idle.record_healthy_step(counts)
        if number % interval == 0 and (warning := idle.find()):
            named.append(number)
            assert warning.startswith("no token has reached expert 1 of layer 2 for 3 steps")
    # Idle for three steps at 4, 19 and 25; of a look after that only if no token has come since.
    expected = {1: [4, 19, 25], 2: [4, 26], 3: [6, 27], 4: [4, 28]}
    assert named == expected[interval]


def test_layers_without_experts_and_zero_steps_give_no_warning() -> None:
    for limit, counts in ((1, torch.zeros(2, 4)), (0, torch.eye(4)), (1, torch.ones(2, 4))):
        idle = IdleExperts(limit)
        assert idle.find() == ""
        idle.record_healthy_step(counts)
        assert idle.find() == ""


def test_a_warning_of_many_experts_names_some_and_counts_the_others() -> None:
    idle, counts = IdleExperts(1), torch.zeros(2, MAX_NAMED)
    counts[:, 0] = 9
    idle.record_healthy_step(counts)
    warning = idle.find()
    assert warning.count(" of layer ") == MAX_NAMED
    assert f"expert 1 of layer 1 and {MAX_NAMED - 2} more for 1 steps" in warning
