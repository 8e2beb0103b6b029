"""What `torchtitan-cp train` asks of the check and the launcher, and what it refuses before it starts a rank."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import train
from tests.support.runs import write_run
from torchtitan_cp.__main__ import main
from torchtitan_cp.cli import train as command
from torchtitan_cp.cli.check import main as check_config
from torchtitan_cp.cli.options import default_ranks
from torchtitan_cp.config.run import Job
from torchtitan_cp.runtime import launcher


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nnodes", "2"], "several nodes need --rdzv-endpoint"),
        (["--nproc", "0"], "argument --nproc: 0 is less than 1"),
        (["--verify-parity", "-4"], "argument --verify-parity: -4 is less than 0"),
    ],
)
def test_what_makes_no_job_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["x.toml", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


class Launcher:
    """Stands in for the module that starts ranks."""

    LOCALHOST = launcher.LOCALHOST

    def __init__(self) -> None:
        self.jobs: list[tuple[list[str], int, dict[str, object]]] = []

    def launch(
        self, program: list[str], ranks: int, nodes: int, endpoint: str, job: Job, *, stopped_code: int = 0
    ) -> int:
        limits = {"max_restarts": job.max_restarts, "join_seconds": job.startup_timeout_seconds}
        self.jobs.append((program, ranks, {"nodes": nodes, "endpoint": endpoint, **limits}))
        return 0


def started(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> tuple[list[str], tuple[list[str], int, dict[str, object]]]:
    """The command of the check, and what the launcher is asked for."""
    launcher, checks = Launcher(), []
    monkeypatch.setattr(command, "load_launcher", lambda check, stopped_code: checks.append(check) or launcher)
    assert command.main(arguments) == 0
    [check], [job] = checks, launcher.jobs
    return check, job


@pytest.mark.parametrize("size", [["--nproc", "8"], ["--ranks", "32"]])
def test_a_node_of_several_checks_for_all_ranks_and_starts_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: list[str]
) -> None:
    config = str(write_run(tmp_path))
    place = ["--nnodes", "4", "--rdzv-endpoint", "node0:29500"]
    check, job = started(monkeypatch, [config, *size, *place, "--optimizer.lr=1e-4"])
    assert check[1:] == ["-m", "torchtitan_cp", "check", config, "--ranks", "32", "--optimizer.lr=1e-4"]
    program = [str(command.TRAIN), config, "--optimizer.lr=1e-4"]
    assert job == (program, 8, {"max_restarts": 3, "nodes": 4, "endpoint": "node0:29500", "join_seconds": 1800.0})
    assert command.TRAIN.is_file()


@pytest.mark.parametrize(("given", "length"), [([], "0"), (["512"], "512")])
def test_parity_is_asked_of_the_ranks_and_the_check_knows_that_no_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: list[str], length: str
) -> None:
    config = str(write_run(tmp_path))
    check, job = started(monkeypatch, [config, "--nproc", "2", "--training.seed=3", "--verify-parity", *given])
    assert job[0] == [str(command.TRAIN), config, "--training.seed=3", "--verify-parity", length]
    assert check[-2:] == ["--training.seed=3", "--verify-parity"]


def test_an_override_with_a_space_is_no_value_of_the_option_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, override = str(write_run(tmp_path)), "--model.overrides={n_layers = 1}"
    check, job = started(monkeypatch, [override, config, "--nproc", "2", "--verify-parity", override])
    assert job[0] == [str(command.TRAIN), config, override, override, "--verify-parity", "0"]
    assert check[-3:] == [override, override, "--verify-parity"]
    layers: list[int] = []
    monkeypatch.setattr(train, "start_ranks", lambda seconds: None)
    monkeypatch.setattr(train, "run_doctor", lambda config, *_: layers.append(config.model.overrides["n_layers"]) or 1)
    assert train.main([override, config, "--doctor", override]) == 0
    assert layers == [1]


def test_the_doctor_is_asked_of_the_ranks_and_its_config_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = str(write_run(tmp_path))
    check, job = started(monkeypatch, [config, "--nproc", "4", "--doctor"])
    assert check[-3:] == ["--ranks", "4", "--doctor"]
    assert job[:2] == ([str(command.TRAIN), config, "--doctor", "0"], 4)
    asked: list[list[str]] = []
    monkeypatch.setattr(command, "main", lambda arguments: asked.append(arguments) or 5)
    assert main(["doctor", config, "--ranks", "2", "--length", "512", "--training.seed=3"]) == 5
    assert asked == [[config, "--ranks", "2", "--doctor", "512", "--training.seed=3"]]
    assert check_config([config, "--ranks", "3", "--doctor", "--parallel.tp=5"]) == 2
    assert check_config([config, "--ranks", "4", "--doctor", "--parallel.tp=5", "--compile.enable=true"]) == 0


@pytest.mark.parametrize(("gpus", "ranks"), [(3, 3), (1, 1), (0, 2)])
def test_check_and_launcher_each_ask_torch_for_the_gpus_of_a_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], gpus: int, ranks: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config, size = str(write_run(tmp_path)), ("--curriculum.stages[0].global_batch_tokens=1536",)
    check, job = started(monkeypatch, [config, "--nnodes", "2", "--rdzv-endpoint", "node0:29500", *size])
    assert check[5:] == ["--nodes", "2", *size]
    assert job[1] == ranks
    assert check_config(check[4:]) == 0
    assert f"20 steps on {2 * ranks} ranks" in capsys.readouterr().out
    assert check_config([config, *size]) == 0
    assert f"20 steps on {ranks} rank" in capsys.readouterr().out, "as run_train.sh on this node"


def test_a_dry_run_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, line: commands.append(line) or sys.exit())
    with pytest.raises(SystemExit):
        command.main(["my.toml", "--dry-run", "--ranks", "64"])
    assert commands == [[sys.executable, str(command.TRAIN), "my.toml", "--dry-run", "--ranks", "64"]]


@pytest.fixture
def _same_signals() -> Iterator[None]:
    """The command answers signals in its own way."""
    before = {number: signal.getsignal(number) for number in command.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_same_signals")
def test_a_config_that_would_not_run_starts_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "launch", lambda *job, **limits: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as ended:
        command.main([str(write_run(tmp_path)), "--nproc", "2", "--parallel.tp=3"])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-size", "8"], "--world-size and --rank need --dry-run"),
        (["--rank=3"], "--world-size and --rank need --dry-run"),
        (["--ranks", "8", "--nproc", "8"], "argument --nproc: not allowed with argument --ranks"),
        (
            ["--ranks", "6", "--nnodes", "4", "--rdzv-endpoint", "a:1"],
            "--ranks 6 cannot be shared evenly by --nnodes 4",
        ),
        (["--doctor", "--verify-parity"], "argument --verify-parity: not allowed with argument --doctor"),
    ],
)
def test_options_that_need_or_exclude_another_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["a.toml", *arguments])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "own", "wanted"),
    [
        (["--nproc=2"], [], ["--ranks", "4"]),
        (["--ranks=6"], [], ["--ranks", "6"]),
        ([], [], ["--ranks", str(2 * default_ranks())]),
        (["--nproc=2"], ["--world-size", "8"], []),
        (["--nproc=2"], ["--world-size=8"], []),
    ],
)
def test_a_dry_run_is_of_as_many_ranks_as_would_start(
    size: list[str], own: list[str], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list[list[str]]()

    monkeypatch.setattr(os, "execv", lambda program, line: commands.append(line) or sys.exit())
    with pytest.raises(SystemExit):
        command.main(["a.toml", *size, "--nnodes=2", "--rdzv-endpoint=a:1", "--dry-run", *own])
    assert commands[0][3:] == ["--dry-run", *own, *wanted]


@pytest.mark.parametrize(
    ("environment", "options", "found"),
    [
        ({}, [], "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, [], "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, [], None),
    ],
)
def test_a_gpus_memory_grows_in_segments_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: dict[str, str],
    options: list[str],
    found: str | None,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is as before once the test has ended
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started(monkeypatch, [str(write_run(tmp_path)), "--nproc", "1", *options])
    assert os.environ.get("PYTORCH_ALLOC_CONF") == found
