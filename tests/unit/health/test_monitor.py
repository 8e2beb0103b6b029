"""Which rank has a bad number and which number it is, from one vector a rank; what is a spike and what is noise."""

import json
import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchtitan_cp.config.run import Health
from torchtitan_cp.health import monitor as monitoring
from torchtitan_cp.health.monitor import HealthMonitor, SpikeDetector, StepReport, largest, read_report

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


def test_a_spike_that_is_trained_on_is_logged_with_its_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitoring.dist, "get_rank", lambda: 0)
    monitor = HealthMonitor(Health(), [Blocks()], 4, CPU)
    assert not monitor.is_bad(replace(report(9.0), spikes=("loss 9.00 is 12 times the deviation above 2.00",)), 321)
    assert caplog.messages == ["spike at step 321: loss 9.00 is 12 times the deviation above 2.00"]


def report(loss: float, norm: float = 1.0, output: float = 5.0) -> StepReport:
    return StepReport(loss=loss, grad_norm=norm, peak_memory_bytes=0, largest_logit=8.0, block_outputs=(2.0, output))


def fed(*losses: float, threshold: float = 10.0, window: int = 32) -> SpikeDetector:
    detector = SpikeDetector(threshold, window)
    for loss in losses:
        detector.record_healthy_step(report(loss))
    return detector


def test_a_value_is_a_spike_beyond_the_threshold_times_the_mad_and_not_before() -> None:
    losses = [4.0, 5.0, 3.0, 6.0, 4.5, 2.0, 5.5, 4.0, 3.5, 7.0]
    median = statistics.median(losses)
    deviation = 1.4826 * statistics.median(abs(loss - median) for loss in losses)
    detector = fed(*losses)
    assert detector.find(report(median + 9.99 * deviation)) == ()
    (line,) = detector.find(report(median + 10.01 * deviation))
    assert line.startswith("the loss is 19")
    assert "10 standard deviations above its median 4.25" in line


def test_numbers_that_hardly_vary_have_a_floor_of_five_percent() -> None:
    detector = fed(*[2.0] * 8)
    assert detector.find(report(2.0 * 1.49)) == ()
    assert detector.find(report(2.0 * 1.51))


def test_each_block_has_its_own_median() -> None:
    detector = fed(*[2.0] * 8)
    (line,) = detector.find(report(2.0, output=50.0))
    assert line.startswith("the largest output of block 1 is 50")
    assert detector.find(report(2.0, norm=9.0))[0].startswith("the gradient norm is 9")


def test_falling_is_no_spike_and_noise_is_none_either() -> None:
    generator = random.Random(0)
    detector = SpikeDetector(10.0, 64)
    for step in range(2000):
        now = report(6.0 * 0.999**step + generator.gauss(0, 0.1), norm=generator.lognormvariate(0, 0.4))
        assert detector.find(now) == ()
        detector.record_healthy_step(now)


def test_a_spike_that_was_left_out_does_not_hide_the_next() -> None:
    detector = fed(*[2.0, 2.2, 1.8, 2.1] * 4)
    for _ in range(50):
        assert detector.find(report(40.0))
    assert detector.find(report(2.1)) == ()


def test_nothing_is_a_spike_before_a_quarter_of_the_window_and_after_a_new_stage() -> None:
    detector = fed(*[2.0] * 7)
    assert detector.find(report(1e6)) == ()
    detector.record_healthy_step(report(2.0))
    assert detector.find(report(1e6))
    detector.recent = []
    assert detector.find(report(1e6)) == ()


def test_the_window_slides() -> None:
    detector = fed(*[2.0] * 16, window=16)
    assert detector.find(report(9.0))
    for _ in range(9):
        detector.record_healthy_step(report(9.0))
    assert detector.find(report(9.0)) == ()
    assert len(detector.recent) == 16


def test_a_resumed_run_finds_spikes_as_one_that_never_stopped() -> None:
    straight = fed(*[2.0, 3.0, 2.5, 2.2, 2.8] * 2)
    resumed = SpikeDetector(10.0, 32)
    resumed.recent = json.loads(json.dumps(straight.recent))
    for loss in (5.0, 7.0, 30.0):
        assert resumed.find(report(loss)) == straight.find(report(loss))
