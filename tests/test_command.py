"""`torchtitan-cp COMMAND`, and what `train` refuses before it starts a rank."""

import sys
from pathlib import Path

import pytest

from tests.runs import write_run
from torchtitan_cp import launch
from torchtitan_cp.__main__ import COMMANDS, main


def test_every_command_says_what_it_takes_and_another_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        assert "usage: " in capsys.readouterr().out
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {command} " in listed for command in COMMANDS)
    assert main(["trian"]) == 2
    assert "there is no command 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nnodes", "2"], "several nodes need --rdzv-endpoint"),
        (["--nproc", "0"], "--nproc and --nnodes are at least 1"),
    ],
)
def test_what_makes_no_job_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(["x.toml", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def started(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> list[list[list[str]]]:
    """Of each job: the arguments of torchrun, of train.py, and of its check; of a dry run the command."""
    jobs: list[list[list[str]]] = []

    class Passed:
        returncode = 0

    monkeypatch.setattr(launch.subprocess, "run", lambda command, **options: jobs.append([command]) or Passed())
    monkeypatch.setattr(launch, "launch", lambda *parts: jobs.append([list(part) for part in parts]) or 0)
    assert launch.main(arguments) == 0
    return jobs


def test_a_node_of_several_checks_for_all_ranks_and_starts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ["--nnodes", "4", "--node-rank", "3", "--rdzv-endpoint", "node0:29500"]
    [(torchrun, job, check)] = started(monkeypatch, ["my.toml", "--nproc", "8", *place, "--optimizer.lr=1e-4"])
    assert check == ["-m", "torchtitan_cp.preflight", "my.toml", "--ranks", "32", "--optimizer.lr=1e-4"]
    assert torchrun[:4] == ["--nnodes", "4", "--node-rank", "3"]
    assert torchrun[-4:] == ["--rdzv-endpoint", "node0:29500", "--nproc-per-node", "8"]
    assert job == [str(launch.TRAIN), "my.toml", "--optimizer.lr=1e-4"]
    assert launch.TRAIN.is_file()


@pytest.mark.parametrize(("given", "length"), [([], "0"), (["512"], "512")])
def test_parity_is_asked_of_the_ranks_and_not_of_the_check(
    monkeypatch: pytest.MonkeyPatch, given: list[str], length: str
) -> None:
    [(_, job, check)] = started(
        monkeypatch, ["my.toml", "--nproc", "2", "--training.seed=3", "--verify-parity", *given]
    )
    assert job == [str(launch.TRAIN), "my.toml", "--training.seed=3", "--verify-parity", length]
    assert check[-1] == "--training.seed=3"


def test_a_dry_run_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    [(command,)] = started(monkeypatch, ["my.toml", "--dry-run", "--world-size", "64"])
    assert command == [sys.executable, str(launch.TRAIN), "my.toml", "--dry-run", "--world-size", "64"]


def test_a_config_that_would_not_run_starts_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.Launcher, "go", lambda launcher: pytest.fail("ranks were started"))
    assert launch.main([str(write_run(tmp_path)), "--nproc", "2", "--parallel.tp=3"]) == 2
