"""The entry point as a user meets it: bad input, a killed rank, a finished run."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train
from tests.support.jobs import ForkedJob
from tests.support.rank_pool import RankPool
from tests.support.runs import prepared, write_run
from torchtitan_cp.cli import check
from torchtitan_cp.runtime import watchdog as failure
from torchtitan_cp.training import trainer

pytestmark = pytest.mark.jobs

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["--training.sed=1"], "unknown key training.sed\n  fix: did you mean seed?"),
        (["--training.seed=one"], "training.seed must be an integer, got 'one'"),
        (
            ["--curriculum.stages[0].seq_len=130", "--curriculum.stages[0].cp=2"],
            "cannot be shared by cp = 2 and tp = 1: it is not divisible by 4",
        ),
        (["--parallel.cp=3"], "3 does not divide them"),
        (["--curriculum.stages[0].cp=3"], "curriculum.stages[0].cp = 3 does not divide dp_shard x cp = 2"),
        (["--tokenizer.kind=sentencepiece", "--tokenizer.path=/none.model"], "/none.model"),
        (["--data.path=/none"], "/none"),
        (["--job.dump_folder=/dev/null/run"], "job.dump_folder = '/dev/null/run' cannot be written: Not a directory"),
        (["--model.flavor=9B"], "model.flavor = '9B' is not known\n  fix: use one of debug, 60M"),
        (
            ["--model.overrides.layers=9"],
            "unknown key model.overrides.layers\n  fix: did you mean n_layers?",
        ),
        (["--model.overrides.n_layers=1000000000"], "n_layers = 1000000000 is more than 10000"),
        (["--model.overrides.n_kv_heads=3"], "n_heads = 4 is not a multiple of n_kv_heads = 3"),
        (["--model.architecture=rnn"], "model.architecture = 'rnn' is not known"),
        (
            ["--parallel.cp=2", "--context_parallel.strategy=hybrid", "--context_parallel.all_to_all_ranks=3"],
            "all_to_all_ranks = 3 does not fit strategy 'hybrid' on 2 ranks",
        ),
        (
            ["--parallel.tp=2", "--model.overrides.n_kv_heads=1"],
            "parallel.tp = 2 does not divide the model's n_kv_heads",
        ),
        (
            ["--parallel.pp=2", "--model.overrides.n_layers=1"],
            "a pipeline of 2 ranks x 1 pipeline stages is longer than the model",
        ),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], wanted: str
) -> None:
    path = write_run(tmp_path)
    assert check.main([str(path), "--ranks", "2", *overrides]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {path}: ")
    assert errors.count(str(path)) == 1
    assert wanted in errors
    assert "Traceback" not in errors


def test_a_syntax_error_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[job]\ndump_folder = \n")
    assert check.main([str(path)]) == 2
    assert f"{path}, line 2" in capsys.readouterr().err


def test_the_check_of_a_good_config_prints_what_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_run(tmp_path))
    assert check.main([path, "--ranks", "2"]) == 0
    assert "20 steps on 2 ranks: 128 (cp 1)" in capsys.readouterr().out
    assert check.main([path, "--ranks", "1", "--curriculum.stages[0].steps=1"]) == 0
    assert "1 step on 1 rank: 128 (cp 1)" in capsys.readouterr().out


def start(path: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, str(REPOSITORY / "train.py"), str(path), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def rank_process(launcher: int, rank: int) -> int:
    """The process that the launcher started as this rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"\0RANK={rank}\0" in "\0" + (folder / "environ").read_text():
                return int(folder.name)
        except (OSError, ValueError):
            continue
    raise AssertionError(f"rank {rank} not found")


@pytest.mark.deep
def test_a_killed_rank_ends_the_job_by_name_within_a_minute_and_the_next_run_resumes(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    settings = ("--parallel.cp=2", "--checkpoint.interval=4", "--curriculum.stages[0].steps=400")
    job = start(path, *settings)
    deadline = time.monotonic() + 90
    while not list((tmp_path / "run" / "checkpoints").glob("step-[0-9]")):
        assert job.poll() is None, job.stdout.read() if job.stdout else ""
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.05)
    os.kill(rank_process(job.pid, 1), signal.SIGKILL)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert re.search(r"rank\s*: 1 .*\n\s*exitcode\s*: -9", output), output
    taken = len(metrics.read_text().splitlines())
    assert 0 < taken < 400

    again = ForkedJob(2, path, *settings, f"--curriculum.stages[0].steps={taken + 4}")
    assert again.wait() == [0, 0], again.log.read_text()
    assert re.search(r"resumed from .*step-\d+: \d+ of", again.log.read_text())
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, taken + 5))


def test_ranks_without_a_dry_run_are_the_launchers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train.main(["--ranks", "8"])
    assert caught.value.code == 2
    assert "--ranks needs --dry-run here; run_train.sh and torchtitan-cp train start" in capsys.readouterr().err


def limits_of_preparing(path: Path) -> tuple[float, float]:
    """On a rank: how long it may prepare the corpus, and how long what comes after."""
    limits, prepare = [], trainer.prepare_corpus

    def watched(*arguments: Any) -> Any:
        limits.append(failure._now.limit_seconds)
        return prepare(*arguments)

    trainer.prepare_corpus = watched  # type: ignore[assignment]
    try:
        prepared(path, "--job.startup_timeout_seconds=77")
    finally:
        trainer.prepare_corpus = prepare
    return limits[0], failure._now.limit_seconds


def test_preparing_a_corpus_is_not_limited_by_the_startup_timeout(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(limits_of_preparing, write_run(tmp_path))[0] == (math.inf, 77.0)


ENDS_DURING_AN_EXPORT = """
import threading, time, torch, train
def export():
    while True:
        torch.ones(1000, 1000).bfloat16().clone()
def main(arguments):
    threading.Thread(target=export, daemon=True).start()
    time.sleep(0.3)
    return 0
train.main = main
train.worker_main()
"""


def test_a_rank_that_ends_during_an_export_ends_well() -> None:
    """Python stops its threads wherever they are, and torch aborts the process for that."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_DURING_AN_EXPORT], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
