"""Kernels, products and copies, timed on a CPU in a rehearsal's sizes: each stands beside its prediction."""

from pathlib import Path

import pytest

from benchmarks import cuda_rates
from benchmarks.cuda import read
from benchmarks.cuda_record import Record
from torchtitan_cp.attention.kernels import KERNELS


def test_products_memory_and_copies_stand_beside_what_is_predicted(tmp_path: Path) -> None:
    cuda_rates.rates(Record(tmp_path / "results.jsonl", "rates", rehearsal=True))
    lines = read(tmp_path / "results.jsonl")
    assert {line["case"].partition(":")[0] for line in lines} == {"product", "memory", "copy"}
    for line in lines:
        figures = line["figures"]
        assert line["status"] == "passed"
        assert all(figure > 0 for figure in figures.values())
        if line["case"].startswith("product"):
            assert figures["forward_of_predicted"] == figures["forward_tflops"] / figures["predicted_tflops"]
        else:
            ratio = figures["gigabytes_per_second"] / figures["predicted_gigabytes_per_second"]
            assert figures["gigabytes_per_second_of_predicted"] == ratio


def test_a_kernel_that_is_missing_or_cannot_run_is_said_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_rates, "NAMES", ("cpu", "flash9", "flash"))
    monkeypatch.setattr(cuda_rates, "DIMS", (64,))
    cuda_rates.kernels(Record(tmp_path / "results.jsonl", "kernels", rehearsal=True))
    missing, *lines = read(tmp_path / "results.jsonl")
    known = f"there is no kernel of this name; there are {', '.join(KERNELS)}"
    assert (missing["case"], missing["status"], missing["why"]) == ("flash9", "not run", known)
    kinds = ("causal", "documents of 32", "windows of 32")
    assert [line["case"] for line in lines] == [
        f"{name}, head dim 64, {kind}" for kind in kinds for name in ("cpu", "flash")
    ]
    assert [line["status"] for line in lines] == ["passed", "not run"] * 3
    assert lines[1]["why"] == "it runs on cuda, not cpu"
    assert all(line["figures"]["backward_tflops_of_predicted"] > 0 for line in lines[::2])
