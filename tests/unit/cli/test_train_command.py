"""`torchtitan-cp COMMAND`, and what `train` refuses before it starts a rank."""

import signal
import sys
from pathlib import Path

import pytest

import train
from tests.support.runs import write_run
from torchtitan_cp.__main__ import COMMANDS, main
from torchtitan_cp.cli import train as launch


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
    assert check == ["-m", "torchtitan_cp.cli.check", "my.toml", "--ranks", "32", "--optimizer.lr=1e-4"]
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


@pytest.mark.parametrize(("handler", "hears"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_under_nohup_a_job_does_not_hear_its_terminal_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: signal.Handlers, hears: bool
) -> None:
    starts: list[list[str]] = []

    class Started:
        stopping = False

        def __init__(self, arguments: list[str]) -> None:
            starts.append(arguments)

        def go(self) -> None: ...

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(launch, "Launcher", Started)
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert launch.launch([], ["train.py", str(write_run(tmp_path))]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    [arguments] = starts
    handled = arguments[arguments.index("--signals-to-handle") + 1].split(",")
    assert handled == ["SIGINT", "SIGQUIT", *(["SIGHUP"] if hears else [])]


def test_the_first_rank_of_a_node_to_know_why_a_run_ends_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 may wait for another, or never come to it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "3" / "error.json"))
    assert train._complain(3, "error: no room", train.BAD_INPUT) == train.BAD_INPUT
    assert capsys.readouterr().err == "error: no room\n"
    train._complain(0, "error: no room", train.BAD_INPUT)
    assert capsys.readouterr().err == ""
    assert train._earlier_end() == tmp_path / "no_use_to_restart"
    assert (tmp_path / "no_use_to_restart").read_text() == "2"
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    for rank in (0, 1):
        train._complain(rank, f"error: of {rank}", train.BAD_INPUT)
    assert capsys.readouterr().err == "error: of 0\n"
