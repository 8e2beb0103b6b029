"""The planner's table gets an entry for the machine at hand."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models import ARCHITECTURES
from tests.support.runs import write_run
from torchtitan_cp.cli import plan as command
from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.planner import measure
from torchtitan_cp.planner.devices import ACCELERATORS, MEMORY_BANDWIDTH
from torchtitan_cp.planner.measure import measure_accelerator
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.runtime.device import Device
from torchtitan_cp.training.registry import register

SIZES = "dim = 64, n_layers = 3, n_heads = 4, n_kv_heads = 2, head_dim = 16, windows = [16, 0, 16]"


def test_rates_are_work_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_seconds(run: Callable[[], Any]) -> float:
        run()
        return 2.0

    monkeypatch.setattr(measure, "_seconds", two_seconds)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    register(ARCHITECTURES)
    options = [f"--model.overrides={{{SIZES}}}", "--training.compute_dtype=float32", "--metrics.peak_tflops=0.5"]
    config = load_config(write_run(tmp_path), options)
    shape = sized_model_args(config)
    found = measure_accelerator(config, shape, 2)
    tokens = config.curriculum.stages[0].seq_len
    assert found.peak_flops[torch.float32] == 0.5e12
    assert found.linear * found.peak_flops[torch.float32] == pytest.approx(6 * tokens * 64 * shape.ffn_dim / 2)
    seen = torch.ones(tokens, tokens).tril()
    pairs = int(seen.sum() + 2 * (seen - seen.tril(-16)).sum())
    # Three layers of two seconds each.
    assert found.attention_forward * found.peak_flops[torch.float32] == pytest.approx(4 * 16 * 4 * pairs / 6)
    assert found.attention_backward == pytest.approx(2.5 * found.attention_forward)
    assert found.memory_bandwidth * MEMORY_BANDWIDTH == pytest.approx(3 * tokens * shape.ffn_dim * 4 / 2)
    assert found.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    assert found.link_bandwidth == ACCELERATORS["cpu"].link_bandwidth


def test_a_gpu_is_found_in_the_table_by_its_name() -> None:
    gpu = torch.device("cuda", 0)

    class Named(Device):
        name = "NVIDIA H200"

    assert measure.table_entry(Named(gpu, "nccl")) is ACCELERATORS["h200-141g"]
    Named.name = "NVIDIA L40S"
    with pytest.raises(ConfigError, match="the planner's table does not have NVIDIA L40S"):
        measure.table_entry(Named(gpu, "nccl"))


def test_the_command_measures_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    threads = torch.get_num_threads()
    try:
        assert command.main([str(write_run(tmp_path)), "--device", "here"]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 x here" in printed
    assert "measured now on this config's shapes" in printed
    assert "Measured: matrix products at" in printed
