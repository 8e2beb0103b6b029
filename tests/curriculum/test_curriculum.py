"""Stages and rotary frequencies: arithmetic against numbers worked out by hand and against the papers."""

import math

import pytest

from torchtitan_cp.config import Config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.config.sections import Curriculum, Rope, Stage, Training
from torchtitan_cp.curriculum import resolve_stages, rope_frequencies, stage_of

STAGES = (
    Stage(seq_len=1024, steps=10, global_batch_tokens=16384, cp=1),
    Stage(seq_len=2048, tokens=100_000, global_batch_tokens=16384, cp=-1, name="long"),
)


def test_stages_follow_each_other_and_tokens_round_up_to_steps() -> None:
    config = Config(curriculum=Curriculum(STAGES), training=Training(micro_batch_sequences=2))
    first, second = resolve_stages(config, Degrees(1, 1, 4, 1, 1))
    assert (first.name, first.first_step, first.last_step, first.cp, first.dp) == ("1K", 0, 10, 1, 4)
    assert first.micro_batches == 16384 // (1024 * 4 * 2)
    assert (second.name, second.first_step, second.steps, second.cp, second.dp) == ("long", 10, 7, 4, 1)
    assert second.micro_batches * second.micro_batch_sequences * second.seq_len * second.dp == 16384


def test_a_step_finds_its_stage_and_a_finished_run_its_last() -> None:
    plans = resolve_stages(Config(curriculum=Curriculum(STAGES)), Degrees(1, 1, 1, 1, 1))
    assert [stage_of(plans, step).index for step in (0, 9, 10, 16, 17, 99)] == [0, 0, 1, 1, 1, 1]


def test_unscaled_frequencies_are_powers_of_theta() -> None:
    frequencies, factor = rope_frequencies(Rope(theta=10000.0), 8)
    assert frequencies == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert factor == 1.0


def test_linear_scaling_divides_every_frequency() -> None:
    frequencies, _ = rope_frequencies(Rope(theta=10000.0, kind="linear", factor=4.0), 8)
    assert frequencies == pytest.approx([0.25, 0.025, 0.0025, 0.00025])


def test_llama3_scaling_leaves_fast_turns_divides_slow_ones_and_blends_between() -> None:
    rope = Rope(theta=500000.0, kind="llama3", factor=8.0, original_seq_len=8192)
    scaled, _ = rope_frequencies(rope, 128)
    base, _ = rope_frequencies(Rope(theta=500000.0), 128)
    for frequency, original in zip(scaled, base, strict=True):
        wavelength = 2 * math.pi / original
        if wavelength < 8192 / 4:
            assert frequency == original
        elif wavelength > 8192 / 1:
            assert frequency == pytest.approx(original / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert frequency == pytest.approx((1 - smooth) * original / 8 + smooth * original)
    assert any(base[i] / 8 < scaled[i] < base[i] for i in range(64))
