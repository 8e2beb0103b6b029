"""The command that runs benchmarks: tables, figures with where they are from, and what cannot run."""

import importlib
import inspect
import json
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main


def test_a_benchmark_prints_a_table_and_writes_where_its_figures_are_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    assert (
        main(["plan", "--seq-len", "4096", "--ranks", "4", "--kinds", "log-normal", "--quick", "--json", str(out)]) == 0
    )
    assert "| log-normal | documents | ring " in capsys.readouterr().out
    assert main(["float8", "--seq-len", "64", "--ranks", "2", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert set(report) == {"plan", "float8"}
    plan = report["plan"]
    assert plan["options"] == {
        "seq_len": 4096, "ranks": 4, "documents": 200, "kinds": ["log-normal"], "rounds": 5,
    }  # fmt: skip
    assert len(plan["rows"]) == 6
    assert plan["rows"][0]["median_ms"] > 0
    assert "torch" in plan["versions"]
    assert {"processor", "device", "commit", "changed_files", "load_before"} <= set(plan)


def test_help_names_every_benchmark_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed and about in printed for name, about in BENCHMARKS.items())
    with pytest.raises(SystemExit, match="0"):
        main(["kernels", "--help"])
    assert "--lengths" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["strategy"], "there is no benchmark strategy; there are: strategies, packed"),
        (["plan", "float8", "--ranks", "2"], "--ranks 2: give the one benchmark whose options these are"),
        (["plan", "--kinds", "normal"], "invalid choice: 'normal'"),
        (["plan", "--heads", "2"], "unrecognized arguments: --heads 2"),
        (["plan", "--json", "tests"], "--json tests: that is a folder; give a file in it"),
        (["plan", "--json", "nowhere/figures.json"], "there is no folder nowhere"),
        (["plan", "--json", "README.md"], "that file is not one of figures, and is left as it is"),
    ],
)
def test_bad_input_is_one_message(arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert wanted in capsys.readouterr().err


def test_what_cannot_run_here_is_said_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--kernels", "cudnn", "--device", "cpu", "--quick"]) == 1
    errors = capsys.readouterr().err
    assert "PlanError: kernel cudnn cannot run here: it runs on cuda, not cpu" in errors
    assert "did not run to the end: kernels" in errors


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_quick_values_are_of_options_and_measure_takes_them(name: str) -> None:
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    assert list(inspect.signature(benchmark.measure).parameters) == list(benchmark.options)
    assert set(benchmark.quick) <= set(benchmark.options)
    assert set(benchmark.choices) <= set(benchmark.options)
