"""What is a spike and what is noise."""

import json
import random
import statistics

from torchtitan_cp.health.monitor import SpikeDetector, StepReport


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
