"""The planner's memory held to that of a dry run with a GPU's operations, over the matrix of options."""

import shutil
import sys
from pathlib import Path

import pytest
import torchgen
import yaml

from benchmarks.planned_memory import OPTIONS, ROWS, compare_in_process
from tests.support.fake_cuda import ONE_KERNEL

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("c++") or shutil.which("g++")), reason="needs Linux and a C++ compiler"
)
DEFAULT = [("8B", "full"), ("8B", "selective, offload"), ("experts", "full, ep 8, offload")]
# `python -m benchmarks planned_memory` makes these too. Their dry runs take five times as long as the others.
SLOW = {
    ("8B", "full, 8 tiles, tp 4"),
    ("8B", "attention_saved, 8 tiles, tp 2, cp 2"),
    ("8B", "full, 8 tiles, 8bit"),
    ("8B", "full, 8 tiles, offload, pp 2"),
    ("8B", "full, pp 2, tp 2"),
    ("experts", "full, 8 tiles, ep 8"),
}


def is_alike(model: str, options: str) -> bool:
    """Whether another row has the same peak, during the loss or in a strategy that adds nothing there."""
    if model == "1B":
        return "8 tiles" in options or "cp 4" in options
    return options.startswith(("none, cp 4", "selective, cp 4")) and "all_to_all" not in options


def unlike(cases: list[tuple[str, str]]) -> list[tuple[str, str, float]]:
    """The cases whose two figures are more than a tenth apart."""
    rows = list(compare_in_process(cases))
    assert [(row["model"], row["options"]) for row in rows] == cases
    return [(row["model"], row["options"], row["ratio"]) for row in rows if abs(row["ratio"] - 1) > 0.10]


@needs_compiler
def test_planner_and_dry_run_agree_where_they_once_differed_most() -> None:
    assert not unlike(DEFAULT)


@needs_compiler
@pytest.mark.deep
@pytest.mark.xdist_group("jobs/test_page_runs.py")  # early, as it takes minutes
def test_planner_and_dry_run_agree_within_10_percent_over_the_options() -> None:
    every = [(model, options) for model, rows in ROWS.items() for options in rows]
    assert not unlike([case for case in every if case not in (*DEFAULT, *SLOW) and not is_alike(*case)])


def test_every_option_is_in_a_row() -> None:
    used = {option for rows in ROWS.values() for options in rows for option in options.split(", ")}
    assert used == set(OPTIONS)


def test_what_a_cuda_build_runs_as_one_kernel_is_what_torch_lists() -> None:
    """Operators with a kernel for CUDA that are made of several others where a device has none."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    functions = {entry["func"].partition("(")[0]: entry for entry in yaml.safe_load(path.read_text())}

    def devices(entry: dict[str, object]) -> set[str]:
        dispatch = entry.get("dispatch") or {}
        assert isinstance(dispatch, dict)
        return {device.strip() for names in dispatch for device in names.split(",")}

    found = set()
    for name, entry in functions.items():
        own = devices(entry)
        delegated = devices(functions[entry["structured_delegate"]]) if "structured_delegate" in entry else set()
        if "CompositeImplicitAutograd" in own and "CUDA" in own | delegated:
            found.add(name)
    assert found == set(ONE_KERNEL)
