"""The budget of a step on one H100: limits that were worked out by hand, and the planner's own figures."""

from typing import Any

import pytest

from benchmarks.budget import BENCHMARK, attention_limit, config_of, measure, one_gpu, predict
from models import ARCHITECTURES
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.training.registry import register

PEAK = 989e12
# cuDNN's rates in tiles of a ring, and that of large matrix products: what the limits below assume.
MEASURED = {"forward_tflops": 594.0, "backward_tflops": 541.0, "products_tflops": 700.0}
LAYERS = ("--model.flavor=8B", "--model.overrides.n_layers=8", "--model.overrides.vocab_size=32064")


def rows(**options: Any) -> list[dict[str, Any]]:
    return list(measure(**{**BENCHMARK.options, **MEASURED, **options}))


@pytest.mark.parametrize(
    ("rates", "recomputed", "limit"),
    [
        ((594, 541), False, 48.1),
        ((594, 541), True, 38.0),
        ((336, 310), False, 27.5),
        ((336, 310), True, 21.6),
        ((685, 539), False, 49.8),
        ((685, 539), True, 40.2),
        ((455, 403), False, 35.7),
        ((455, 403), True, 28.4),
    ],
)
def test_attention_alone_has_the_limit_of_its_kernels_rates(
    rates: tuple[float, float], recomputed: bool, limit: float
) -> None:
    forward, backward = (rate * 1e12 for rate in rates)
    assert 100 * attention_limit(forward, backward, recomputed, PEAK) == pytest.approx(limit, abs=0.5)


@pytest.mark.parametrize(
    ("length", "sequences", "tiles", "limits"),
    [
        (8192, 4, 1, {"none": 57, "selective": 56, "attention_saved": 48, "full": 47}),
        (32768, 1, 1, {"none": 54, "selective": 54, "attention_saved": 48, "full": 44}),
        (131072, 1, 1, {"none": 52, "selective": 52}),
        (131072, 1, 16, {"selective": 49.7, "attention_saved": 49.1, "full": 41}),
        (262144, 1, 1, {"none": 50, "selective": 50}),
        (262144, 1, 16, {"attention_saved": 48.8, "full": 40}),
    ],
)
def test_eight_layers_of_the_8b_have_the_limits_that_were_worked_out_by_hand_within_a_point(
    length: int, sequences: int, tiles: int, limits: dict[str, float]
) -> None:
    for row in rows(lengths=[length], sequences=sequences, tiles=tiles, modes=list(limits)):
        assert 100 * row["mfu"] == pytest.approx(limits[row["activations"]], abs=1.0)


def test_norm_clipping_and_update_take_the_milliseconds_of_the_hand_count() -> None:
    """AdamW 21 and the norm 3; clipping 6 by a pass of its own, of which the fused kernel has the writing alone."""
    register(ARCHITECTURES)
    options = ("--curriculum.stages[0].seq_len=32768", "--curriculum.stages[0].global_batch_tokens=32768")
    clipped, unclipped = (
        plan_config(config_of((*LAYERS, *options, f"--training.max_grad_norm={norm}")), one_gpu("h100-80g"))[0]
        for norm in (1.0, 0.0)
    )
    assert 1e3 * unclipped.seconds["optimizer"] == pytest.approx(21 + 3, rel=0.1)
    assert 1e3 * (clipped.seconds["optimizer"] - unclipped.seconds["optimizer"]) == pytest.approx(6 / 2, rel=0.1)


def test_their_memory_is_that_of_the_hand_count() -> None:
    found = rows(lengths=[32768]) + rows(lengths=[131072], tiles=16)
    wanted = [68, 55, 39, 39, 75, 69, 49, 42]
    assert [row["gib"] for row in found] == pytest.approx(wanted, rel=0.04)
    assert [row["fits"] for row in found] == [True] * 4 + [False] + [True] * 3


def test_a_shape_is_planned_as_the_same_config_by_the_planner() -> None:
    register(ARCHITECTURES)
    options = ("--curriculum.stages[0].seq_len=32768", "--curriculum.stages[0].global_batch_tokens=32768")
    options += ("--compile.enable=true", "--activation.checkpoint=selective", "--training.loss_chunk_tokens=4096")
    config = config_of((*LAYERS, *options))
    planned = plan_config(config, one_gpu("h100-80g"))[0]
    (row,) = measure(**{**BENCHMARK.options, "lengths": [32768], "modes": ["selective"]})
    assert row["ms"] == planned.step_seconds * 1e3
    assert row["mfu"] == planned.mfu
    # Documents: the kernel of dense tiles is no longer taken, and the MFU counts the pairs that are allowed.
    packed = config.with_keys(data={"document_mask": True})
    apart, whole = (predict(packed, one_gpu("h100-80g"), lengths) for lengths in ((8192,) * 4, (32768,)))
    slower = plan_config(packed, one_gpu("h100-80g"))[0]
    assert (whole.seconds, whole.mfu) == (slower.step_seconds, slower.mfu)
    quarter = slower.linear_flops + slower.attention_flops / 4
    assert apart.mfu == pytest.approx(quarter / apart.seconds / PEAK)
    assert apart.seconds == pytest.approx(slower.step_seconds - 0.75 * slower.seconds["attention"], rel=1e-3)
