"""What the search finds fits, is no slower than what it was given, and says why."""

import dataclasses
import re
from pathlib import Path

import pytest

from models import ARCHITECTURES
from tests.support.runs import write_run
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.cli.plan import main
from torchtitan_cp.config import Config, ConfigError, load_config
from torchtitan_cp.planner.choices import choices, savings_to_try
from torchtitan_cp.planner.devices import Cluster, make_cluster
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.planner.search import NO_SLOWER, search, stage_options
from torchtitan_cp.planner.search_report import nothing_fits, reasons
from torchtitan_cp.training.registry import register


def find(config: Config, cluster: Cluster) -> tuple[Config, list[str]]:
    """The config that a search finds, and what it says."""
    result = search(config, cluster)
    return result.found_config(), reasons(result)


OPTIONS = ["--curriculum.stages[0].seq_len=8192", "--curriculum.stages[0].global_batch_tokens=65536"]


def test_the_best_layout_fits_and_is_no_slower_than_the_given_one(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    config = load_config(write_run(tmp_path), [*OPTIONS, "--parallel.tp=2", "--activation.checkpoint=full"])
    cluster = make_cluster("h100-80g", ranks_per_node=4)
    found, said = find(config, cluster)
    assert all(estimate.fits for estimate in plan_config(found, cluster))
    given, chosen = (sum(e.step_seconds for e in plan_config(c, cluster)) for c in (config, found))
    assert chosen <= given
    assert [reason.split(" ")[0] for reason in said[:8]] == [
        "parallel.tp", "parallel.pp", "activation.checkpoint", "activation.mlp_tiles", "activation.offload",
        "optimizer.offload_state", "parallel.fsdp_cpu_offload", "8K:",
    ]  # fmt: skip


def test_a_node_of_three_shares_a_sequence_by_three(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    one = ["--curriculum.stages[0].seq_len=6144", "--curriculum.stages[0].global_batch_tokens=6144"]
    found, _ = find(load_config(write_run(tmp_path), one), make_cluster("h100-80g", ranks_per_node=3))
    assert found.curriculum.stages[0].cp == 3


def test_the_written_file_plans_as_the_search_said_and_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, written = write_run(tmp_path), tmp_path / "found.toml"
    arguments = [str(path), *OPTIONS, "--device", "cpu", "--search", "--write", str(written)]
    assert main(arguments) == 0
    assert "micro-batches; cp" in capsys.readouterr().out
    config = load_config(written)
    assert plan_config(config, make_cluster("cpu"))[0].fits
    assert main(arguments) == 2
    assert "File exists\n  fix: give the path of a new file" in capsys.readouterr().err


def hopper(config: Path, *overrides: str) -> tuple[Config, Cluster]:
    register(ARCHITECTURES)
    return load_config(config, overrides), make_cluster("h100-80g", 1)


TWO = """
[model]
flavor = "{flavor}"

[tokenizer]
kind = "bytes"

[evaluation]
interval = 10

[[curriculum.stages]]
seq_len = 8192
steps = 10
global_batch_tokens = 524288
{own}

[[curriculum.stages]]
seq_len = 65536
global_batch_tokens = 524288
until = {until}
"""


def two_stages(
    folder: Path, own: str = "", until: str = "{validation_loss = 2.5, max_tokens = 1e8}", flavor: str = "1B"
) -> Path:
    path = folder / "two.toml"
    path.write_text(TWO.replace("{own}", own).replace("{until}", until).replace("{flavor}", flavor))
    return path


@pytest.mark.parametrize("own", ["activation = {checkpoint = 'none'}", "activation = {offload = true}", "tp = 4", ""])
def test_what_is_found_is_planned_as_it_is_written_whatever_stages_had(tmp_path: Path, own: str) -> None:
    config, cluster = hopper(two_stages(tmp_path, own))
    found, said = find(config, cluster)
    for estimate in plan_config(found, cluster):
        assert estimate.fits
        choice = f"cp = {estimate.stage.cp}, {estimate.strategy}, {estimate.stage.micro_batches} micro-batches; "
        assert any(reason.startswith(f"{estimate.stage.name}: {choice}") for reason in said)
    left_out = "curriculum.stages [0]: their own tp, pp, activation.checkpoint and activation.offload are left out"
    assert (left_out in said) == bool(own)
    for stage in found.curriculum.stages:
        own_activation = (stage.activation.checkpoint, stage.activation.offload)
        assert (stage.tp, stage.pp, *own_activation) == (None, None, None, None)


@pytest.mark.parametrize("first", [8192, 8202])
def test_a_gate_on_the_first_length_is_searched_and_kept_on_ranks_that_can_share_it(tmp_path: Path, first: int) -> None:
    """Its stage may warm up for longer than it may last, as a run allows."""
    path = two_stages(tmp_path, until="{short_loss_rise = 0.02, max_tokens = 1e8}")
    keys = {"seq_len": first, "global_batch_tokens": 64 * first}
    overrides = [f"--curriculum.stages[0].{name}={value}" for name, value in keys.items()]
    config, cluster = hopper(path, *overrides, "--curriculum.stages[1].lr={warmup_steps = 1000}")
    found, _ = find(config, cluster)
    assert found.curriculum.stages[1].until["short_loss_rise"] == 0.02
    assert all(estimate.fits for estimate in plan_config(found, cluster))


def test_a_warm_up_that_outlasts_one_stage_is_no_obstacle(tmp_path: Path) -> None:
    config, cluster = hopper(two_stages(tmp_path), "--lr_scheduler.warmup_steps=15")
    found, _ = find(config, cluster)
    assert found.lr_scheduler.warmup_steps == 15
    assert plan_config(found, cluster)


def test_where_a_run_would_refuse_all_the_reason_is_said(tmp_path: Path) -> None:
    config, cluster = hopper(two_stages(tmp_path), "--curriculum.stages[0].global_batch_tokens=100")
    with pytest.raises(ConfigError, match="global_batch_tokens = 100 is not a multiple"):
        search(config, cluster)


def test_what_float8_messages_do_not_cover_is_not_proposed(tmp_path: Path) -> None:
    path = two_stages(tmp_path)
    config, cluster = hopper(path, "--context_parallel.kv_transfer=float8")
    slow = make_cluster("h100-80g", 1, link_bandwidth=12e9)
    found, _ = find(config, slow)
    assert all(stage.strategy not in ("all_to_all", "hybrid") for stage in found.curriculum.stages)
    asked = load_config(path, ["--context_parallel.kv_transfer=float8", "--context_parallel.strategy=all_to_all"])
    with pytest.raises(ContextParallelError, match="does not cover"):
        plan_config(dataclasses.replace(asked, parallel=dataclasses.replace(asked.parallel, cp=8)), cluster)


def test_what_cannot_fit_is_said(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    config = load_config(write_run(tmp_path), [*OPTIONS, "--model.flavor=405B", "--model.overrides={}"])
    result = search(config, make_cluster("cpu"))
    assert result.found is None
    error = nothing_fits(result)
    assert str(error).startswith("nothing fits on 2 x cpu. The nearest misses by ")
    assert "GiB of device memory, of which 6.9 are usable, with cp = " in str(error)
    assert error.fix == "use more GPUs"


def one_gpu(path: Path, *overrides: str) -> tuple[Config, Cluster]:
    """At 128K on one H100."""
    keys = {"seq_len": 131072, "global_batch_tokens": 131072, "steps": 1}
    options = [f"--curriculum.stages[0].{name}={value}" for name, value in keys.items()]
    register(ARCHITECTURES)
    config = load_config(path, [*options, "--model.flavor=8B", "--model.overrides={vocab_size = 128256}", *overrides])
    return config, make_cluster("h100-80g", ranks_per_node=1)


@pytest.mark.parametrize("tiles", [1, 16])
def test_what_saves_memory_is_tried_with_the_layout_and_what_is_set_stays(tmp_path: Path, tiles: int) -> None:
    config, cluster = one_gpu(write_run(tmp_path), f"--activation.mlp_tiles={tiles}", "--checkpoint.asynchronous=false")
    found, said = find(config, cluster)
    assert plan_config(found, cluster)[0].fits
    assert found.parallel.fsdp_cpu_offload
    assert not found.optimizer.offload_state  # the other includes it
    assert found.activation.mlp_tiles == tiles
    [reason] = [reason for reason in said if reason.startswith("parallel.fsdp_cpu_offload = true: ")]
    assert re.fullmatch(r"parallel\.fsdp_cpu_offload = true: false misses by [\d.]+ GiB of device memory", reason)
    assert any(reason.startswith("activation.mlp_tiles = 1: 16 takes ") for reason in said) == (tiles == 1)
    [costs] = [reason for reason in said if reason.startswith("offload costs, in a step: 128K ")]
    (planned,) = plan_config(found, cluster)
    assert costs.endswith(f"128K {planned.offload_seconds:.3g} s of {planned.step_seconds:.3g}")


def test_tiles_are_found_where_they_are_faster_than_recomputing(tmp_path: Path) -> None:
    config, _ = one_gpu(write_run(tmp_path), "--training.compute_dtype=bfloat16", "--checkpoint.asynchronous=false")
    found, said = find(config, make_cluster("h100-80g", ranks_per_node=2))
    assert (found.activation.checkpoint, found.activation.mlp_tiles) == ("none", 8)
    [reason] = [reason for reason in said if reason.startswith("activation.mlp_tiles = 8: ")]
    assert re.search(r": 1 misses by [\d.]+ GiB of device memory.*; 16 takes ", reason)
    assert any(reason.startswith("nearest miss: activation.checkpoint = selective, ") for reason in said)


def test_no_choice_that_a_search_leaves_out_is_faster(tmp_path: Path) -> None:
    """Over everything that it may choose, each planned by itself."""
    path = write_run(tmp_path)
    config, cluster = one_gpu(path, "--model.overrides={vocab_size = 32064, n_layers = 12}")[0], hopper(path)[1]
    found, _ = find(config, cluster)
    args, fastest = sized_model_args(config), float("inf")
    for degrees in choices(config, args, cluster):
        for saved in savings_to_try(config, cluster):
            choice = degrees._replace(savings=saved)
            for options in stage_options(config, args, choice, cluster, []):
                fastest = min([fastest, *(option.days for option in options if option.fits)])
    assert fastest <= plan_config(found, cluster)[0].days <= NO_SLOWER * fastest


def test_activations_are_offloaded_where_that_is_faster(tmp_path: Path) -> None:
    """So attention is not computed again."""
    options = ("--model.overrides={vocab_size = 32064, n_layers = 12}", "--activation.mlp_tiles=16")
    config, cluster = one_gpu(write_run(tmp_path), *options, "--parallel.fsdp_cpu_offload=true")
    found, _ = find(config, cluster)
    assert found.activation.offload
    given = config.with_keys(activation={"checkpoint": "full"})
    chosen, recomputed = (plan_config(c, cluster)[0] for c in (found, given))
    assert chosen.fits
    assert chosen.step_seconds < recomputed.step_seconds


def test_with_muon_the_search_does_not_add_what_a_run_refuses_beside_it(tmp_path: Path) -> None:
    result = search(*one_gpu(write_run(tmp_path), "--optimizer.name=muon", "--activation.mlp_tiles=8"))
    assert result.found is None
    assert {one.choice.savings.fsdp_cpu_offload for one in result.tried} == {False}
    assert {one.choice.savings.mlp_tiles for one in result.tried} == {8}
    assert "optimizer.offload_state = true, parallel.fsdp_cpu_offload = false" in str(nothing_fits(result))


def test_where_the_host_is_too_small_the_search_says_by_how_much_and_what_would_help(tmp_path: Path) -> None:
    large = ("--model.flavor=70B", "--training.compute_dtype=bfloat16")
    error = nothing_fits(search(*one_gpu(write_run(tmp_path), *large)))
    said = re.match(
        r"nothing fits on 1 x h100-80g\. The nearest misses by ([\d.]+) GiB of a node's host memory: stage 128K needs "
        r"[\d.]+ GiB of device memory, of which 72\.8 are usable and ([\d.]+) GiB of a node's host memory, of which "
        r"214\.2 are usable, with cp = 1, parallel\.tp = 1, ",
        str(error),
    )
    assert said
    assert float(said[2]) - float(said[1]) == pytest.approx(214.2, abs=0.1)
    assert error.fix
    assert error.fix.startswith("use more GPUs, or a host with more memory (--host-memory), or checkpoint.asynchronous")


def test_experts_are_shared_where_that_is_faster_and_the_choice_is_said(tmp_path: Path) -> None:
    options = ["--model.architecture=moe", "--model.flavor=qwen3-30B-A3B", "--model.overrides={}"]
    register(ARCHITECTURES)
    options += ["--activation.checkpoint=full"]
    config, cluster = load_config(write_run(tmp_path), [*OPTIONS, *options]), make_cluster("h100-80g", 1)
    found, said = find(config, cluster)
    assert any(reason.startswith(f"parallel.ep = {found.parallel.ep}: ") for reason in said)
    given, chosen = (sum(e.step_seconds for e in plan_config(c, cluster)) for c in (config, found))
    assert chosen <= given
