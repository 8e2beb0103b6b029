"""Which rank has a bad number, and which number it is, from one vector a rank."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchtitan_cp.config.sections import Health
from torchtitan_cp.health import monitor as monitoring
from torchtitan_cp.health.monitor import HealthMonitor, StepReport, largest, read_report

CPU = torch.device("cpu")
# Two blocks: loss, its divisor, learned tokens, logit, gradient, memory, requests to stop and to save, outputs
# of the blocks, squared norms of the blocks and of the rest.
GOOD = [10.0, 4.0, 6.0, 3.0, 0.5, 100.0, 0.0, 0.0, 1.0, 2.0, 9.0, 7.0, 0.0]


def bad(**changes: float) -> list[float]:
    places = {"loss": 0, "gradient": 4, "output_0": 8, "output_1": 9, "square_0": 10, "square_rest": 12}
    row = list(GOOD)
    for name, value in changes.items():
        row[places[name]] = value
    return row


def found(*rows: list[float]) -> list[str]:
    return list(read_report(np.array(rows)).findings)


def test_all_finite_finds_nothing() -> None:
    assert found(GOOD, GOOD) == []


def test_a_rank_is_named_and_not_those_whose_gradients_it_spoiled() -> None:
    spoiled = bad(square_0=math.nan, square_rest=math.nan)
    assert found(spoiled, bad(loss=math.nan, gradient=math.nan, square_0=math.nan)) == ["rank 1: the loss is nan"]


def test_the_first_block_whose_output_is_bad_is_named_before_all_that_follows_from_it() -> None:
    assert found(GOOD, bad(output_1=math.inf, loss=math.nan)) == ["rank 1: the output of block 1 is inf"]
    assert found(bad(output_0=math.nan, output_1=math.nan)) == ["rank 0: the output of block 0 is nan"]


def test_a_backward_names_its_rank_before_the_reduction_hides_it() -> None:
    rows = (bad(square_0=math.inf), bad(gradient=math.inf, square_0=math.inf))
    assert found(*rows) == ["rank 1: the gradient at its first block is inf, the loss is finite"]


def test_a_weight_gradient_that_is_bad_alone_names_the_block_and_who_holds_the_shard() -> None:
    (finding,) = found(GOOD, bad(square_0=math.inf))
    assert finding.startswith("rank 1: a weight's gradient in block 0 is inf")
    (finding,) = found(bad(square_rest=math.nan), GOOD)
    assert finding.startswith("rank 0: a weight's gradient in the embedding, last norm or output is nan")


def test_the_report_has_the_mean_loss_the_norms_and_the_largest_of_all_ranks() -> None:
    report = read_report(np.array([GOOD, [2.0, 4.0, 6.0, 5.0, 0.5, 90.0, 0.0, 1.0, 4.0, 0.5, 16.0, 9.0, 8.0]]))
    assert report == StepReport(
        loss=3.0,
        grad_norm=7.0,
        peak_memory_bytes=100,
        largest_logit=5.0,
        block_grad_norms=(5.0, 4.0),
        block_outputs=(4.0, 2.0),
        save=True,
        learned_tokens=6,
    )


class Blocks(nn.Module):
    """A part that has layers 1 and 2 of four; the second gives a tuple, as a block with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"1": nn.Linear(3, 3), "2": Doubled()})

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layers["2"](self.layers["1"](x))
        return out


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, x.sum()


def test_the_watch_sees_the_largest_of_all_forwards_and_backwards_and_forgets_it() -> None:
    part, x = Blocks(), torch.randn(4, 5, 3, requires_grad=True)
    watch = HealthMonitor(Health(), [part], 4, CPU)
    outputs = [part(scale * x) for scale in (1.0, -3.0)]
    with torch.no_grad():
        part(100 * x)
    for out in outputs:
        out.square().sum().backward()
    *seen, gradient = watch.pop_largest()
    largest_output = max(out.abs().max().item() for out in outputs)
    assert [x.item() for x in seen] == [0.0, pytest.approx(largest_output / 2), pytest.approx(largest_output), 0.0]
    inner = [(2 * out @ (2 * part.layers["1"].weight)).abs().max().item() for out in outputs]  # type: ignore[operator]
    assert gradient.item() == pytest.approx(max(inner), rel=1e-5)
    assert watch.pop_largest().tolist() == [0.0] * 5


def test_the_watch_passes_nan_on_whatever_comes_after() -> None:
    part, x = Blocks(), torch.ones(1, 1, 3, requires_grad=True)
    watch = HealthMonitor(Health(), [part], 4, CPU)
    for scale in (math.nan, 1.0):
        part(scale * x).sum().backward()
    *seen, gradient = watch.pop_largest()
    assert [bool(x.isnan()) for x in seen] == [False, True, True, False]
    assert gradient.dtype == torch.float32
    assert not gradient.isnan()  # 1.0's own gradient does not depend on x, and NaN's neither


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_largest_value_is_exact_and_lets_nothing_pass(dtype: torch.dtype, value: float) -> None:
    x = torch.randn(2, 7, 5).to(dtype)
    x[0, 3, 1] = -9.0
    assert largest(x).item() == 9.0
    x[1, 6, 4] = value
    assert not largest(x).isfinite()


@pytest.mark.parametrize(("loss", "spikes"), [(1.0, ("x",)), (math.nan, ())])
def test_spikes_are_looked_for_in_finite_steps_alone(
    monkeypatch: pytest.MonkeyPatch, loss: float, spikes: tuple[str, ...]
) -> None:
    monkeypatch.setattr(monitoring, "gather_rows", lambda own: own[None].numpy())
    monitor = HealthMonitor(Health(), [Blocks()], 4, CPU)
    monkeypatch.setattr(monitor.spikes, "find", lambda _: ("x",))
    zero, norms = torch.zeros(()), torch.zeros(5)
    report = monitor.check_step((torch.tensor(loss), zero, zero, zero), norms, 0, (False, False))
    assert (report.spikes, bool(report.findings)) == (spikes, not spikes)
