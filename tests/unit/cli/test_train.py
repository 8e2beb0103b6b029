"""`torchtitan-cp COMMAND`, and what `train` refuses before it starts a rank."""

import gc
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from tests.support.runs import write_run
from torchtitan_cp.__main__ import COMMANDS, main
from torchtitan_cp.cli import train as command
from torchtitan_cp.cli.check import main as check_config
from torchtitan_cp.cli.command import run_command
from torchtitan_cp.config.sections import Job
from torchtitan_cp.data.corpus.store import append_to
from torchtitan_cp.data.errors import PreparationStoppedError
from torchtitan_cp.runtime import job_notes, launcher
from torchtitan_cp.runtime.job_notes import FOLDER_VARIABLE, EndNote


def test_every_command_says_what_it_takes_and_another_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert "usage: " in capsys.readouterr().out
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    assert main(["trian"]) == 2
    assert "there is no command 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nnodes", "2"], "several nodes need --rdzv-endpoint"),
        (["--nproc", "0"], "argument --nproc: 0 is not between 1 and 2^62"),
        (["--verify-parity", "-4"], "argument --verify-parity: -4 is not between 0 and 2^62"),
    ],
)
def test_what_makes_no_job_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["x.toml", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "x.toml", "--ranks", "0"],
        ["doctor", "x.toml", "--length", "-5"],
        ["plan", "x.toml", "--nodes", "0"],
        ["plan", "x.toml", "--inter-bandwidth", "inf"],
        ["evaluate", "run", "--depths", "0"],
        ["evaluate", "run", "--lengths", "0"],
        ["generate", "run", "--chat", "--temperature", "nan"],
        ["generate", "run", "--chat", "--seed", f"{2**80}"],
    ],
)
def test_a_number_out_of_range_is_refused_by_its_option(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert f"argument {arguments[-2]}: {arguments[-1]} is not between " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stop", "code", "said"),
    [
        (PreparationStoppedError("stopped while tokenizing"), 143, "stopped while tokenizing\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_command_that_is_stopped_ends_without_a_traceback(
    stop: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise stop

    assert run_command(work) == code
    assert capsys.readouterr().err == said


def test_what_the_encoding_of_the_output_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train, "start_ranks", lambda seconds: None)
    monkeypatch.setattr(train, "run_doctor", lambda *_: print("\u2265 4K") or True)
    for work in (
        lambda: train.main([str(write_run(tmp_path)), "--doctor"]),
        lambda: run_command(lambda: print("\u2265")),
    ):
        output = io.TextIOWrapper(io.BytesIO(), "latin-1")
        monkeypatch.setattr(sys, "stdout", output)
        assert not work()
        output.flush()
        assert output.buffer.getvalue().startswith(b"\\u2265")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (
            lambda: os.rmdir("cache/gone"),
            "cache/gone: No such file or directory\n  fix: check the disk",
        ),
        (lambda: append_to(Path("/dev/full"), b"."), "/dev/full: No space left on device\n  fix: check the disk"),
        (
            lambda: Path("/dev/full").write_text("."),
            "No space left on device\n  fix: check the disk",
        ),
    ],
)
def test_a_disk_that_fails_is_one_message_with_the_file_and_the_launcher_may_try_again(
    write: Callable[[], int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(train, "start_ranks", lambda seconds: None)
    monkeypatch.setattr(train, "run", lambda *_: write())
    assert train.main([str(write_run(tmp_path))]) == 1
    assert capsys.readouterr().err.startswith(f"[rank 0] error: {said}")
    assert run_command(write) == 1
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_a_system_error_of_no_file_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train, "start_ranks", lambda seconds: os.getpgid(2**22))
    with pytest.raises(ProcessLookupError):
        train.main([str(write_run(tmp_path))])


def test_a_command_whose_output_nobody_reads_ends_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writes, "w"))
    assert run_command(lambda: bool(print("said", flush=True))) == 1
    monkeypatch.undo()
    assert capsys.readouterr().err == (
        "error: Broken pipe: what read this output, or another process of this command, has ended\n"
    )


class Launcher:
    """Stands in for the module that starts ranks."""

    LOCALHOST = launcher.LOCALHOST

    def __init__(self) -> None:
        self.jobs: list[tuple[list[str], int, dict[str, object]]] = []

    def launch(self, program: list[str], ranks: int, nodes: int, endpoint: str, job: Job) -> int:
        limits = {"max_restarts": job.max_restarts, "join_seconds": job.startup_timeout_seconds}
        self.jobs.append((program, ranks, {"nodes": nodes, "endpoint": endpoint, **limits}))
        return 0


def started(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> tuple[list[str], tuple[list[str], int, dict[str, object]]]:
    """The command of the check, and what the launcher is asked for."""
    launcher, checks = Launcher(), []
    monkeypatch.setattr(command, "load_launcher", lambda check: checks.append(check) or launcher)
    assert command.main(arguments) == 0
    [check], [job] = checks, launcher.jobs
    return check, job


def test_a_node_of_several_checks_for_all_ranks_and_starts_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = str(write_run(tmp_path))
    place = ["--nnodes", "4", "--rdzv-endpoint", "node0:29500"]
    check, job = started(monkeypatch, [config, "--nproc", "8", *place, "--optimizer.lr=1e-4"])
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
    assert asked == [[config, "--nproc", "2", "--doctor", "512", "--training.seed=3"]]
    assert check_config([config, "--ranks", "3", "--doctor", "--parallel.tp=5"]) == 2
    assert check_config([config, "--ranks", "4", "--doctor", "--parallel.tp=5", "--compile.enable=true"]) == 0


@pytest.mark.parametrize("key", ["job.timeout_seconds", "job.startup_timeout_seconds", "checkpoint.timeout_seconds"])
def test_no_collective_gives_up_before_the_longest_limit_of_the_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(train, "start_ranks", limits.append)
    monkeypatch.setattr(train, "run_doctor", lambda config, world, length: True)
    assert train.main([str(write_run(tmp_path)), "--doctor", f"--{key}=5000"]) == 0
    assert limits == [5000.0]


def test_a_model_that_is_not_safe_ends_the_job_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(train, "start_ranks", lambda seconds: None)
    monkeypatch.setattr(train, "run_doctor", lambda config, world, length: length == 0)
    config = str(write_run(tmp_path))
    assert train.main([config, "--doctor"]) == 0
    assert train.main([config, "--doctor", "512"]) == 5


def test_garbage_is_collected_again_once_all_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []
    monkeypatch.setattr(command, "main", lambda arguments: collects.append(gc.isenabled()) or 0)
    monkeypatch.setattr(train, "main", lambda arguments: collects.append(gc.isenabled()) or 0)
    monkeypatch.setattr(train, "Path", lambda name: SimpleNamespace(write_text=lambda text: None))
    monkeypatch.setattr(train.threading, "active_count", lambda: 1)  # with more a rank ends its process here
    try:
        assert main(["train", "my.toml"]) == 0
        gc.disable()
        train.worker_main()
    finally:
        gc.enable()
    assert collects == [True, True]


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


def test_a_dry_run_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, line: commands.append(line) or sys.exit())
    with pytest.raises(SystemExit):
        command.main(["my.toml", "--dry-run", "--world-size", "64"])
    assert commands == [[sys.executable, str(command.TRAIN), "my.toml", "--dry-run", "--world-size", "64"]]


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


@pytest.mark.parametrize(("handler", "hears"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_under_nohup_a_job_does_not_hear_its_terminal_go(
    monkeypatch: pytest.MonkeyPatch, handler: signal.Handlers, hears: bool
) -> None:
    for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", FOLDER_VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(launcher, "_run", lambda *job: EndNote(0, ""))
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert launcher.launch(["train.py"], 2, 1, launcher.LOCALHOST, Job()) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    handled = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(",")
    assert handled == ["SIGINT", "SIGQUIT", *(["SIGHUP"] if hears else [])]


def test_without_a_launcher_rank_0_says_why_a_run_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert job_notes.end_job(f"error: of {rank}", 2) == 2
    assert capsys.readouterr().err == "error: of 0\n"


def test_the_launcher_reads_the_note_of_the_first_rank_to_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(job_notes, "WAIT_SECONDS", 0.0)
    for rank in (3, 0):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert job_notes.end_job(f"error: of {rank}", 3) == 3
        os.utime(tmp_path / f"end-{rank}", times=(100 - rank, 100 - rank))
    assert capsys.readouterr().err == ""
    assert [note for _, note in job_notes.end_notes(tmp_path)] == [EndNote(3, "error: of 3"), EndNote(3, "error: of 0")]


def test_a_rank_that_cannot_leave_a_note_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert job_notes.end_job("error: no room", 2) == 2
    assert capsys.readouterr().err.endswith("error: no room\n")


def test_a_stop_while_the_ranks_of_a_failed_attempt_end_starts_no_other() -> None:
    agent = object.__new__(launcher.NodeAgent)
    agent.stopping = threading.Event()
    agent.stopping.set()
    with pytest.raises(launcher.JobEndedError) as ended:
        agent._rendezvous(None)  # type: ignore[arg-type]
    assert ended.value.args[0].code == 0


class Gone(io.StringIO):
    """A stream whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_stop_reaches_the_ranks_where_nobody_reads_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, signals = object.__new__(launcher.NodeAgent), list[tuple[int, int]]()
    agent.stopping, agent.ranks = threading.Event(), {0: 11, 1: 12}
    monkeypatch.setattr(os, "kill", lambda *of: signals.append(of))
    monkeypatch.setattr(sys, "stderr", Gone())
    agent._stop(signal.SIGTERM, None)
    assert agent.stopping.is_set()
    assert signals == [(11, signal.SIGTERM), (12, signal.SIGTERM)]


def test_a_relaunch_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    job_notes.ask_for_relaunch()
    assert job_notes.take_relaunch(tmp_path)
    assert not job_notes.take_relaunch(tmp_path)


@pytest.mark.parametrize(("rank", "level"), [(0, logging.DEBUG), (1, logging.WARNING)])
def test_rank_0_logs_at_the_level_of_the_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, level: int
) -> None:
    logger = logging.getLogger("torchtitan_cp")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(logger, "level", logging.WARNING)
    config = str(write_run(tmp_path))
    assert train.main([config, "--dry-run", "--rank=9", "--job.log_level=debug"]) == 2, "there is no such rank"
    assert logger.level == level


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-size", "8"], "--world-size, --rank, --device need --dry-run"),
        (["--device=h100-80g"], "--world-size, --rank, --device need --dry-run"),
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
    ("own", "wanted"), [([], ["--world-size", "4"]), (["--world-size", "8"], []), (["--world-size=8"], [])]
)
def test_a_dry_run_is_of_as_many_ranks_as_would_start(
    own: list[str], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list[list[str]]()

    monkeypatch.setattr(os, "execv", lambda program, line: commands.append(line) or sys.exit())
    with pytest.raises(SystemExit):
        command.main(["a.toml", "--nproc=2", "--nnodes=2", "--rdzv-endpoint=a:1", "--dry-run", *own])
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
