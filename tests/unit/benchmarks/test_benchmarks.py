"""The command that runs benchmarks, and what its tables are made of."""

import importlib
import inspect
import json
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.benchmark import table_of
from benchmarks.kernels import pairs_of, plans_to_run, steps_of
from benchmarks.scale import draw_mask, figures, mask_pairs
from torchtitan_cp.attention import make_plan
from torchtitan_cp.attention.plan import busiest_rank
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.strategy_costs import Heads, Rates, step_pairs


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


def test_a_row_without_a_column_has_a_dash() -> None:
    table = table_of([{"library": "a", "ms": 1234.5}, {"library": "b", "does_not_run": "no"}])
    assert [list(column.cells) for column in table.columns] == [["a", "b"], ["1,234", "-"], ["-", "no"]]


@pytest.mark.parametrize("strategy", ["ring", "hybrid"])
@pytest.mark.parametrize("kind", ["causal", "packed"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_the_busiest_rank_told_by_the_layout_has_the_most_pairs_of_all_plans(
    strategy: str, kind: str, layout: str
) -> None:
    mask, inner = draw_mask(kind, 4096, 300), 2 if strategy == "hybrid" else 1
    plans = [
        make_plan(4096, mask=mask, ranks=8, rank=rank, strategy=strategy, layout=layout, all_to_all_ranks=inner)
        for rank in range(8)
    ]
    pairs = [sum(step_pairs(plan)) for plan in plans]
    assert pairs[busiest_rank(plans[0])] == max(pairs)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all", "hybrid"])
@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_work_over_the_mean_is_that_of_all_ranks_plans(strategy: str, kind: str) -> None:
    mask, ranks, heads = draw_mask(kind, 8192, 400), 16, Heads(8, 4, 64)
    rates = Rates(make_cluster("h100-80g", 4, ranks_per_node=4), 1e9, 1e9, 1)
    row = figures(strategy, 8192, ranks, mask, heads, rates)
    inner = {"all_to_all": ranks, "hybrid": 4}.get(strategy, 1)
    cluster = {"ranks": ranks, "ranks_per_node": 4, "row_pairs": rates.row_pairs(heads)}
    plans = [
        make_plan(8192, mask=mask, rank=rank, strategy=strategy, all_to_all_ranks=inner, **cluster)
        for rank in range(ranks)
    ]
    shares = {1: 8, 4: 2, 16: 1}  # query heads of a rank: 16 ranks share 8, so that half of them have only zeros
    work = [sum(step_pairs(plan)) * shares[inner] for plan in plans]
    assert row["over_mean_work"] == pytest.approx(max(work) / (mask_pairs(8192, mask) * 8 / ranks))
    # At a gigaflop a second nothing but the work takes time.
    assert row["ms"] * (1 - row["exposed_share"]) == pytest.approx(max(work) * 14 * 64 / 1e9 * 1e3)


def test_the_kernel_benchmark_runs_the_tiles_of_the_busiest_rank() -> None:
    found = list(plans_to_run([4096], [8], ["causal", "log-normal"], ["ring", "all_gather", "hybrid"]))
    assert [(mask, strategy) for mask, strategy, _, _ in found] == [
        ("causal", "ring"), ("causal", "all_gather"), ("log-normal", "ring"), ("log-normal", "all_gather"),
    ]  # fmt: skip
    for _, strategy, ranks, plan in found:
        others = [make_plan(4096, mask=plan.mask, ranks=ranks, rank=rank, strategy=strategy) for rank in range(ranks)]
        assert pairs_of(steps_of(plan)) == max(sum(step_pairs(other)) for other in others)
