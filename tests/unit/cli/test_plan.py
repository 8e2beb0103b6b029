"""The command `plan` as a user meets it."""

import re
from pathlib import Path

import pytest

from tests.support.long_plans import LONG, ONE_GPU, alone
from torchtitan_cp.attention.kernels import choose_for_case, rates
from torchtitan_cp.cli import plan
from torchtitan_cp.cli.plan import main
from torchtitan_cp.planner.devices import Cluster


def test_every_stage_of_the_long_recipe_is_estimated_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LONG, "--nodes", "8"]) == 0
    printed = capsys.readouterr().out
    assert "8,030,261,248 parameters" in printed
    assert len(re.findall(r"^ +stage +4K +16K +64K +256K +512K +1M *$", printed, re.MULTILINE)) == 4
    assert re.search(r"^ +strategy +ring +ring +all_to_all +hybrid +hybrid +hybrid *$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "of"),
    [
        ([], (1, 8)),
        (["--nodes", "2"], (2, 8)),
        (["--ranks", "16"], (2, 8)),
        (["--ranks", "4"], (1, 4)),
        (["--ranks", "16", "--gpus-per-node", "4"], (4, 4)),
        (["--nodes", "2", "--gpus-per-node", "4"], (2, 4)),
        (["--device", "cpu"], (1, 2)),
        (["--device", "cpu", "--ranks", "4"], (1, 4)),
    ],
)
def test_a_number_of_ranks_is_whole_nodes_of_the_device_or_part_of_one(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], of: tuple[int, int]
) -> None:
    clusters = list[Cluster]()
    monkeypatch.setattr(plan, "plan_config", lambda config, cluster: clusters.append(cluster) or [])
    monkeypatch.setattr(plan, "print_estimates", lambda console, estimates: None)
    assert main([LONG, *arguments]) == 0
    assert (clusters[0].nodes, clusters[0].accelerator.ranks_per_node) == of


def test_ranks_that_are_no_whole_nodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LONG, "--ranks", "12"]) == 2
    said = (
        "--ranks 12 are no whole nodes of 8 ranks\n  fix: use a multiple of 8, or say what a node has: --gpus-per-node"
    )
    assert said in capsys.readouterr().err


def test_what_does_not_fit_is_said_with_how_much_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LONG, "--nodes", "8", "--activation.checkpoint=none", "--curriculum.stages[2].cp=1"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"DOES NOT FIT: 64K needs [\d.]+ GiB a rank, [\d.]+ more than the device has, during", printed)
    assert re.search(r"^ +fits +yes +NO +NO ", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--nodes", "3"], "curriculum.stages[3].cp = 16 does not divide dp_shard x cp = 24"),
        (["--training.micro_batch_sequences=7"], "curriculum.stages[0].global_batch_tokens"),
        (["--nodes", "128", "--parallel.tp=16"], "parallel.tp = 16 does not divide the model's n_kv_heads"),
        (["--model.flavor=9B"], "model.flavor = '9B' is not known"),
        (
            ["--parallel.pp=2", "--parallel.pp_schedule=zbv_zero_bubble", "--compile.enable=true", "--nodes", "16"],
            "a compiled block cannot",
        ),
        (["--context_parallel.kernel=cpu"], "attention kernel 'cpu' cannot run this: it runs on cpu, not cuda"),
    ],
)
def test_bad_input_is_one_message(capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str) -> None:
    assert main([LONG, "--nodes", "8", *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {LONG}: ")
    assert wanted in errors


def test_an_unknown_device_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([LONG, "--device", "tpu"])
    assert re.search(r"'?h100-80g'?, '?h200-141g'?, '?a100-80g'?, '?b200-192g'?, '?cpu'?", capsys.readouterr().err)


def test_the_report_names_the_kernels_and_their_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LONG, "--nodes", "8", "--curriculum.stages[1].data={document_mask = true}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "attention by cudnn at 59% forward and 54% backward, attention by flash at 34% forward and 32%" in said


def test_the_report_names_both_kernels_where_the_backward_has_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faster = [rate._replace(backward=0.6) if rate[:2] == (9, "flash") else rate for rate in rates.RATES]
    monkeypatch.setattr(rates, "RATES", faster)
    choose_for_case.cache_clear()
    assert main([LONG, "--nodes", "8"]) == 0
    choose_for_case.cache_clear()
    assert "attention by cudnn and flash at 59% forward and 60% backward" in " ".join(capsys.readouterr().out.split())


def test_what_makes_attention_cheaper_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LONG, "--nodes", "8", "--data.document_mask=true"]) == 0
    said = "4K is planned as one causal sequence: document_mask makes it cheaper"
    assert said in capsys.readouterr().out


def test_no_stage_is_one_message_for_every_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.toml"
    path.write_text('[tokenizer]\nkind = "bytes"\n')
    for device in ("h100-80g", "here"):
        assert main([str(path), "--device", device]) == 2
        assert "there is no stage to train" in capsys.readouterr().err


def test_what_the_host_cannot_hold_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    offload = ("--parallel.fsdp_cpu_offload=true", "--activation.mlp_tiles=8")
    assert alone(*offload, host_bytes=2e12).fits
    small = alone(*offload, host_bytes=128e9)
    assert small.fits_device
    assert not small.fits
    whole_node = ("--gpus-per-node", "1", "--host-memory", "2000")
    assert main([LONG, *ONE_GPU, *whole_node, *offload, "--model.flavor=70B"]) == 1
    printed = capsys.readouterr().out
    found = re.search(r"DOES NOT FIT: 128K needs ([\d.]+) GiB a node, ([\d.]+) more than its host has", printed)
    assert found
    assert float(found[1]) - float(found[2]) == pytest.approx(0.92 * 2e12 / 2**30, abs=0.2)


def test_the_report_has_durations_and_no_fractions_of_a_day(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([LONG, *ONE_GPU, "--device", "h200-141g", "--gpus-per-node", "1", "--optimizer.offload_state=true"]) == 0
    )
    printed = capsys.readouterr().out
    assert re.search(r"^[\d.]+ (s|min) in all$", printed, re.MULTILINE)
    assert re.search(r"^ +duration +[\d.]+ (s|min) *$", printed, re.MULTILINE)
    assert "e-0" not in printed


def test_several_numbers_of_ranks_are_a_table_of_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    given = [LONG, *ONE_GPU, "--search", "--host-memory", "250"]
    assert main([*given, "--ranks", "1,2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ +1 +misses by [\d.]+ GiB of a node's host memory", printed, re.MULTILINE)
    assert re.search(r"^ +2 +yes ", printed, re.MULTILINE)
    assert main([*given, "--ranks", "1"]) == 2
    assert "error: " + LONG + ": nothing fits on 1 x h100-80g. The nearest misses by" in capsys.readouterr().err
    assert main([*given, "--ranks", "1,1"]) == 1


@pytest.mark.parametrize("more", [[], ["--search", "--write", "found.toml"]])
def test_several_numbers_of_ranks_are_for_a_search_that_writes_nothing(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([LONG, "--ranks", "1,2", *more])
    assert "several numbers of --ranks are for --search without --write" in capsys.readouterr().err
