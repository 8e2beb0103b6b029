"""FLOPs of a token and the peak of a device."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models import ARCHITECTURES
from models.architecture import Mixer
from models.llama import Llama, LlamaArgs
from torchtitan_cp.attention import AttentionMask, attend, make_plan
from torchtitan_cp.config.sections import Model
from torchtitan_cp.config.training import Lora
from torchtitan_cp.metrics import throughput
from torchtitan_cp.metrics.throughput import Peak, adapter_flops_per_token, find_peak, flops_per_token, keys_sent
from torchtitan_cp.parallel.lora import apply_lora
from torchtitan_cp.training.model import cast_parameters
from torchtitan_cp.training.registry import empty_model, lora_counts, register


def args(linear_parameters: int, windows: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        linear_parameters=lambda: linear_parameters,
        mixers=[Mixer(4, 4, 64, 64, window) for window in windows],
    )


def test_flops_count_six_a_weight_and_half_the_square_of_attention() -> None:
    assert flops_per_token(args(10**6, [0, 0]), 0) == 6e6
    full_mask = 12 * 2 * 4 * 64 * 4096
    assert flops_per_token(args(0, [0, 0]), 4096) == full_mask / 2
    seen = sum(min(row + 1, 100) for row in range(4096)) / 4096
    assert flops_per_token(args(0, [100]), 4096) == pytest.approx(12 * 4 * 64 * seen, rel=2e-2)


def test_a_delta_rule_counts_three_products_with_its_state_and_a_scan_two() -> None:
    rule, scan = Mixer(0, 0, 0, 0, state_size=1000), Mixer(0, 0, 0, 0, state_size=1000, state_products=2)
    hybrid = SimpleNamespace(linear_parameters=lambda: 0, mixers=[rule, scan])
    assert flops_per_token(hybrid, 4096) == 6 * (3 + 2) * 1000


@pytest.mark.parametrize(
    ("lora", "layers"),
    [
        (Lora(targets=("layers.[79]",)), 7),
        (Lora(targets=("layers.9",), train=("layers.3.*norm",)), 3),
        (Lora(targets=("layers.9",), train=("tok_embeddings",)), 0),
    ],
)
def test_layers_before_the_first_that_is_trained_have_no_backward(lora: Lora, layers: int) -> None:
    register(ARCHITECTURES)
    shape = LlamaArgs(64, 10, 4, 2, 16, 96, vocab_size=128, tie_embeddings=False)
    counts = lora_counts(empty_model(Model(), shape), shape, lora)
    assert counts.forward_layers == layers
    model = Llama(shape, lambda q, k, v, plan, window: attend(q, k, v, plan))
    apply_lora(model, lora)
    cast_parameters(model, torch.float32)
    model.set_rope([1.0] * 8, 1.0, torch.device("cpu"))
    plan = make_plan(32)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 32, dtype=torch.int64), plan.positions, plan).sum().backward()
    changed = adapter_flops_per_token(shape, counts.adapters, counts.whole_linear)
    flops = flops_per_token(shape, 32, [0.0] * 10, changed, layers)
    # Beside attention, which the counter does not see, the first trained layer's input has no gradient.
    assert counter.get_total_flops() == pytest.approx(32 * flops, rel=0.03)


def test_keys_that_windows_do_not_reach_are_not_sent() -> None:
    plans = {window: make_plan(4096, mask=AttentionMask().windowed(window), ranks=2) for window in (0, 65)}
    assert keys_sent(plans, [0]) == 0.75
    assert keys_sent(plans, [65, 65, 65, 0]) == (3 * 2 * 64 / 4096 + 0.75) / 4


def test_peak_is_what_was_stated_else_the_table_else_measured() -> None:
    cpu = torch.device("cpu")
    assert find_peak(cpu, "cpu", torch.float32, 2.5).flops_per_second == 2.5e12
    table = find_peak(cpu, "NVIDIA H200", torch.bfloat16, 0)
    assert table.flops_per_second == 989e12
    assert "data sheet of H200" in table.source
    assert find_peak(cpu, "NVIDIA H100 PCIe", torch.bfloat16, 0).flops_per_second == 756e12
    assert find_peak(cpu, "NVIDIA H100 80GB HBM3", torch.bfloat16, 0).flops_per_second == 989e12
    measured = find_peak(cpu, "cpu, 1 thread a rank", torch.float32, 0)
    assert measured.flops_per_second > 1e9
    assert "torch.float32 matmuls" in measured.source


def test_other_work_on_the_machine_does_not_lower_the_measured_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a clock of 100 GFLOP/s on which other work takes 20 ms out of every matmul of more than 5 ms."""
    now = 0.0

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal now
        seconds = 2 * len(a) ** 3 / 100e9
        now += seconds + 0.02 * (seconds > 0.005)
        return a

    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(torch, "mm", mm)
    assert find_peak(torch.device("cpu"), "cpu", torch.float32, 0).flops_per_second == pytest.approx(100e9)
    assert now < 0.5


def test_an_mfu_beyond_belief_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    peak = Peak(1e9, "measured")
    assert not peak.warn_if_exceeded(0.6)
    assert not caplog.text
    assert peak.warn_if_exceeded(1.13)
    assert "an MFU of 113% is not believable" in caplog.text
    assert "metrics.peak_tflops" in caplog.text
