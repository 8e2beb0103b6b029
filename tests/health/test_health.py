"""Who is ill, what it is called, and what follows."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.ranks import RankPool
from torchtitan_cp.config.sections import Health
from torchtitan_cp.health import GradientProbe, NonFiniteError, Policy, StepReport, exchange
from torchtitan_cp.health.watch import diagnose

GOOD = [10.0, 4.0, 0.5, 2.0, 100.0]


def test_all_finite_finds_nothing() -> None:
    assert diagnose([GOOD, GOOD]) == []


def test_a_loss_names_its_rank_and_not_what_it_spoiled() -> None:
    ill = [math.nan, 4.0, math.nan, math.nan, 100.0]
    spoiled = [10.0, 4.0, 0.5, math.nan, 100.0]
    assert diagnose([spoiled, ill]) == ["rank 1: the loss is nan"]


def test_a_backward_names_its_rank_before_the_reduction_hides_it() -> None:
    rows = [[10.0, 4.0, 0.5, math.inf, 1.0], [10.0, 4.0, math.inf, math.inf, 1.0]]
    assert diagnose(rows) == ["rank 1: the gradient at its first layer is inf, the loss is finite"]


def test_a_weight_gradient_that_overflows_alone_is_still_found() -> None:
    (finding,) = diagnose([GOOD, [10.0, 4.0, 0.5, math.inf, 1.0]])
    assert "shards on rank 1 is inf" in finding


def test_the_probe_sees_the_largest_gradient_over_all_backwards_and_forgets_it() -> None:
    embeddings, layer = nn.Embedding(5, 3), nn.Identity()
    probe = GradientProbe(layer)
    for scale in (1.0, -7.0, 2.0):
        (layer(embeddings(torch.tensor([[1, 2]]))) * scale).sum().backward()
    assert probe.take(torch.device("cpu")).item() == 7.0
    assert probe.take(torch.device("cpu")).item() == 0.0


def test_the_probe_passes_nan_on_whatever_comes_after() -> None:
    embeddings, layer = nn.Embedding(5, 3), nn.Identity()
    probe = GradientProbe(layer)
    for scale in (math.nan, 1.0):
        (layer(embeddings(torch.tensor([[1, 2]]))) * scale).sum().backward()
    assert math.isnan(probe.take(torch.device("cpu")).item())


def run_exchange() -> StepReport:
    rank = torch.distributed.get_rank()
    numbers = (torch.tensor(value) for value in (10.0 * (rank + 1), 6.0, 0.5, 9.0 if rank else 16.0))
    return exchange(*numbers, peak_memory_bytes=1000 + rank)


def test_every_rank_learns_the_mean_loss_the_global_norm_and_the_largest_memory(
    ranks: Callable[[int], RankPool],
) -> None:
    for report in ranks(2)(run_exchange):
        assert report == StepReport(loss=5.0, grad_norm=5.0, peak_memory_bytes=1001, findings=())


def test_halt_raises_with_the_step_and_the_finding() -> None:
    with pytest.raises(
        NonFiniteError, match=r"step 3 \(stage 1, 4K\) is not finite: rank 1: the loss is nan. No weight"
    ):
        Policy(Health(on_nonfinite="halt")).trip("step 3 (stage 1, 4K)", ("rank 1: the loss is nan",))


def test_skip_counts_up_to_its_limit_and_a_good_step_starts_the_count_again() -> None:
    policy = Policy(Health(on_nonfinite="skip", max_consecutive_skips=2))
    assert "(1 of at most 2 in a row)" in policy.trip("step 1", ("x",))
    policy.finite()
    policy.trip("step 3", ("x",))
    policy.trip("step 4", ("x",))
    with pytest.raises(NonFiniteError, match="Skipped 2 steps in a row before it"):
        policy.trip("step 5", ("x",))


def test_the_count_of_skips_survives_a_checkpoint() -> None:
    policy = Policy(Health(on_nonfinite="skip", max_consecutive_skips=2), consecutive_skips=2)
    with pytest.raises(NonFiniteError):
        policy.trip("step 5", ("x",))
