"""The trainer's step walked on a GPU that is not there: what CUDA's operations are given, and what they hold."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import fake_cuda
from tests.support.fake_cuda_walks import CHOICES, Case, accepted, pairwise_cases, walk_in_process
from tests.support.runs import write_run
from torchtitan_cp.parallel.nf4 import SHARDS_BYTES

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("c++") or shutil.which("g++")), reason="needs Linux and a C++ compiler"
)
ALL = pairwise_cases()
QUICK = 2
UPDATE: Case = {"measured": "update"}
WAITS: Case = {**UPDATE, "optimizer": "offload_state"}
KEPT: Case = {"layers": "4"}
OFFLOADED: Case = {**KEPT, "activation": "offload of all"}
IN_NF4: list[Case] = [
    {"base": "nf4", "activation": "selective", "dimensions": "hsdp"},
    {"base": "nf4", "activation": "offload of all", "optimizer": "fsdp_cpu_offload", "experts": "ep"},
]
PROBES: list[Case] = [KEPT, OFFLOADED, UPDATE, WAITS, {**WAITS, "fault": "whole state at once"}]


def test_the_cases_have_every_pair_of_choices() -> None:
    for kind, names in CHOICES.items():
        for other, others in CHOICES.items():
            met = {(case[kind], case[other]) for case in ALL}
            for pair in ((name, second) for name in names for second in others if kind != other):
                assert pair in met or not accepted(dict(zip((kind, other), pair, strict=True))), pair


@needs_compiler
def test_combinations_walk_and_a_tensor_on_the_wrong_device_ends_a_walk(tmp_path: Path) -> None:
    *walked, host = walk_in_process(write_run(tmp_path), [*ALL[:QUICK], {"fault": "rope on the host"}])
    assert [result["case"] for result in walked] == ALL[:QUICK]
    assert not [(result["case"], result["trace"]) for result in walked if "error" in result]
    assert "cpu" in host["error"]
    assert "cuda:0" in host["error"]


@needs_compiler
@pytest.mark.deep
@pytest.mark.xdist_group("jobs/test_page_runs.py")  # early, as it takes a minute
def test_every_pair_of_choices_walks_and_offloading_lowers_a_peak(tmp_path: Path) -> None:
    cases = [*ALL[QUICK:], *(IN_NF4 if SHARDS_BYTES else []), *PROBES]
    results = walk_in_process(write_run(tmp_path), cases)
    assert [result["case"] for result in results] == cases
    assert not [(result["case"], result["trace"]) for result in results if "error" in result]
    kept, offloaded, there, in_parts, whole = results[-len(PROBES) :]
    working = "activations and buffers"
    # What the linear layers of two of four blocks are given: 128 tokens of a rank, E to q, k, v and to the MLP, Q, F.
    assert kept["by_kind"][working] - offloaded["by_kind"][working] >= 2 * 128 * (2 * 64 + 128 + 128) * 2
    state = there["by_kind"]["optimizer"]
    assert in_parts["by_kind"]["optimizer"] < 0.01 * state  # step counters
    # Fetched at once, it takes the memory it takes without offloading; in parts, that of three parameters.
    assert whole["peak_bytes"] >= there["peak_bytes"] - 1024
    assert in_parts["peak_bytes"] < there["peak_bytes"] - 0.4 * state


def test_without_a_compiler_the_message_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cuda.Path, "expanduser", lambda self: tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"needs Linux and a C\+\+ compiler"):
        fake_cuda.build_library()
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false" if os.path.exists("/bin/false") else None)
    with pytest.raises(RuntimeError, match=r"fake_cuda\.cpp does not compile"):
        fake_cuda.build_library()


def test_environments_do_not_share_the_library_that_loads_ones_torch() -> None:
    assert fake_cuda.library_path(Path("/one/torch")) != fake_cuda.library_path(Path("/other/torch"))
