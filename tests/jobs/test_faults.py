"""Full disks, killed and stopped ranks, signals: no step and no checkpoint is lost, spoiled or repeated."""

import ctypes
import errno
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.support.deep import deep_rows
from tests.support.hub_models import save_model
from tests.support.jobs import (
    PATIENCE_SECONDS,
    REPOSITORY,
    ForkedJob,
    Kill,
    LaunchedJob,
    children,
    kill_at,
    lines_of,
    steps_taken,
)
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.runs import TINY, losses, prepared, train, write_run
from torchtitan_cp.checkpoint.manifest import verify_checkpoint
from torchtitan_cp.runtime.watchdog import LOST_RANK

pytestmark = pytest.mark.jobs

PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("faults"))


# A disk that fails -------------------------------------------------------------------------------------------


def train_on_a_full_disk(path: Path, *overrides: str) -> tuple[list[float], list[str]]:
    """On a rank: a run in which rank 1 has no room from step 4 to step 11, at two of the saves."""
    trainer = prepared(path, *overrides)
    create = FileSystem.create_stream

    def create_stream(self: FileSystem, name: object, mode: str) -> object:
        if trainer.world.rank == 1 and 4 <= trainer.progress.step <= 11:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, name, mode)  # type: ignore[arg-type]

    FileSystem.create_stream = create_stream  # type: ignore[method-assign, assignment]
    try:
        trainer.run()
    finally:
        FileSystem.create_stream = create  # type: ignore[method-assign]
    lines = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
    return losses(lines), sorted(path.name for path in trainer.checkpoints.folder.iterdir())


def test_training_goes_on_while_the_disk_is_full_and_saves_again_when_there_is_room(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    at_once = "--training.micro_batch_sequences=2"
    settings = (at_once, "--checkpoint.interval=5", "--checkpoint.keep=9", "--checkpoint.asynchronous=false")
    straight = losses(ranks(2)(train, run_toml, f"--job.dump_folder={run_toml.parent / 'room'}", at_once)[0])
    full = ranks(2)(train_on_a_full_disk, run_toml, f"--job.dump_folder={run_toml.parent / 'full'}", *settings)
    assert full[0] == (straight, ["step-15", "step-20"])


def fail_at_the_end(path: Path, *overrides: str) -> None:
    trainer = prepared(path, *overrides)
    FileSystem.create_stream = None  # type: ignore[method-assign, assignment]
    trainer.run()


@pytest.mark.deep
def test_a_run_whose_last_checkpoint_cannot_be_written_ends_with_an_error(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    folder = f"--job.dump_folder={run_toml.parent / 'no-last'}"
    with pytest.raises(RankFailure, match=r"the last checkpoint, of step 20, could not be written to .*no-last"):
        ranks(2)(fail_at_the_end, run_toml, folder)


# Processes ---------------------------------------------------------------------------------------------------

# 12 steps at 128 tokens, then 12 at 256; saved at every second step, so that most moments lie in or beside a save.
LONG = (
    TINY.replace("steps = 20", "steps = 12").replace("[training]\n", "[training]\nmicro_batch_sequences = 2\n")
    + """
[[curriculum.stages]]
seq_len = 256
steps = 12
global_batch_tokens = 512
cp = -1

[checkpoint]
interval = 2
"""
)
STEPS = 24


@pytest.fixture
def start() -> Iterator[Callable[..., LaunchedJob]]:
    """Starts jobs, which do not outlive the test."""
    jobs: list[LaunchedJob] = []
    yield lambda *arguments, **how: (jobs.append(LaunchedJob(*arguments, **how)), jobs[-1])[1]  # type: ignore[func-returns-value]
    for job in jobs:
        job.kill()


@pytest.fixture(scope="module")
def long_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("long"), LONG)


@pytest.fixture(scope="module")
def uninterrupted(ranks: Callable[[int], RankPool], long_toml: Path) -> list[float]:
    return losses(ranks(2)(train, long_toml, f"--job.dump_folder={long_toml.parent / 'straight'}")[0])


def check_whole(folder: Path, uninterrupted: list[float]) -> None:
    """Every step once, with the losses of the undisturbed run, and every token once."""
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert losses(lines) == uninterrupted
    assert [line["tokens"] for line in lines] == [512 * step for step in range(1, STEPS + 1)]


def test_a_run_killed_in_a_save_and_in_a_step_resumes_each_time_and_loses_no_step(
    long_toml: Path, uninterrupted: list[float]
) -> None:
    folder, draw = long_toml.parent / "killed", random.Random(1)
    for kill in (Kill(5, "save"), Kill(18, "step")):
        job = ForkedJob(2, long_toml, f"--job.dump_folder={folder}")
        try:
            assert kill_at(job, kill, folder, [STEPS // 2], draw, 2), job.log.read_text()
        finally:
            job.end()
    job = ForkedJob(2, long_toml, f"--job.dump_folder={folder}")
    assert job.wait() == [0, 0], job.log.read_text()
    check_whole(folder, uninterrupted)


@pytest.mark.deep
def test_a_job_restarts_by_itself_after_a_rank_is_killed_and_loses_no_step(
    start: Callable[..., LaunchedJob], long_toml: Path, uninterrupted: list[float]
) -> None:
    """torchrun starts the ranks again; tests/jobs/test_kills.py has many more such moments."""
    folder, draw = long_toml.parent / "storm", random.Random(1)
    # After step 5 a save under way is of step 4 at least, and waited for the first to be whole.
    kills = [Kill(5, "save"), Kill(18, "step")]
    job = start(long_toml, f"--job.dump_folder={folder}", f"--job.max_restarts={len(kills)}")
    for kill in kills:
        assert kill_at(job, kill, folder, [STEPS // 2], draw, 2), job.log.read_text()
    assert job.wait() == 0, job.log.read_text()
    check_whole(folder, uninterrupted)
    told = job.log.read_text()
    assert told.count("resumed from") == len(kills)
    assert told.count("has ended or is stopped. Last heard on") == len(kills), told
    assert told.count("sendBytes failed") <= 3 * len(kills), "a store that is gone is asked no more"


@deep_rows(
    "signals",
    [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGUSR1)],
    default=[(signal.SIGTERM,)],
)
def test_a_stop_signal_saves_and_exits_with_0_and_the_next_start_resumes(
    start: Callable[..., LaunchedJob], long_toml: Path, uninterrupted: list[float], signals: tuple[signal.Signals, ...]
) -> None:
    """They arrive while a checkpoint is being written, and on the launcher, as a scheduler sends them."""
    folder, taken = long_toml.parent / f"signals-{len(signals)}", 0
    checkpoints = folder / "checkpoints"
    for which in signals:
        settings = (f"--job.dump_folder={folder}", "--checkpoint.interval=1")
        job = start(long_toml, *settings, imported=len(signals) == 1)  # else a new Python for each rank
        job.wait_for(
            lambda wanted=taken + 3: steps_taken(folder) >= wanted and bool(list(checkpoints.glob("*.partial")))  # type: ignore[misc]
        )
        job.signal(which)
        assert job.wait() == 0, job.log.read_text()
        taken = steps_taken(folder)
        assert 3 <= taken < STEPS
        assert f"stopped by a signal after step {taken} of {STEPS}; the state is saved" in job.log.read_text()
        assert (checkpoints / f"step-{taken}" / "manifest.json").exists()
        assert not list(checkpoints.glob("*.partial"))
    resumed = ForkedJob(2, long_toml, f"--job.dump_folder={folder}")
    assert resumed.wait() == [0, 0], resumed.log.read_text()
    assert f"step-{taken}: {taken} of {STEPS} steps are done" in resumed.log.read_text()
    check_whole(folder, uninterrupted)


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """This process becomes the parent of processes below it that lose theirs, so that it gets their exit codes."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def exit_code(pid: int) -> int:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    raise AssertionError(f"{pid} trains on")


def check_orphans(log: Path, ranks: list[int], folder: Path) -> None:
    """They ended by themselves, said why, and saved the last step."""
    assert [exit_code(pid) for pid in ranks] == [LOST_RANK, LOST_RANK], log.read_text()
    taken, output = steps_taken(folder), log.read_text()
    assert taken >= 3
    assert re.search(r"the launcher on \S+, pid \d+, has ended: its ranks finish their step, save and stop", output)
    assert output.count("was killed; they have stopped and saved; the same command resumes\n") == 1
    assert f"stopped by a signal after step {taken} of " in output
    assert "Traceback" not in output
    assert verify_checkpoint(folder / "checkpoints" / f"step-{taken}") == []


# Longer than it takes to notice, and saved for no other reason.
ENDLESS = ("--curriculum.stages[0].steps=100000", "--checkpoint.interval=100000", "--job.timeout_seconds=16")


def test_ranks_whose_launcher_was_killed_save_and_end(start: Callable[..., LaunchedJob], long_toml: Path) -> None:
    folder = long_toml.parent / "orphans"
    with adopted_orphans():
        job = start(long_toml, f"--job.dump_folder={folder}", *ENDLESS)
        job.wait_for(lambda: steps_taken(folder) >= 3)
        ranks = [pid for pid in map(job.rank, (0, 1)) if pid]
        job.signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        check_orphans(job.log, ranks, folder)
    taken = steps_taken(folder)
    resumed = ForkedJob(2, long_toml, f"--job.dump_folder={folder}", f"--curriculum.stages[0].steps={taken + 1}")
    assert resumed.wait() == [0, 0], resumed.log.read_text()
    assert [line["step"] for line in lines_of(folder)] == list(range(1, taken + 1 + STEPS // 2 + 1))


@pytest.mark.deep
def test_ranks_notice_that_their_launcher_was_killed_under_a_shell_or_torchrun(long_toml: Path) -> None:
    for number, how in enumerate(("torchtitan_cp.cli.train", "torch.distributed.run")):
        folder, log = long_toml.parent / f"shell-{number}", long_toml.parent / f"shell-{number}.log"
        ranks = ["--nproc", "2"] if number == 0 else ["--nproc-per-node", "2", str(REPOSITORY / "train.py")]
        program = [str(long_toml), *ranks] if number == 0 else [*ranks, str(long_toml)]
        command = shlex.join([sys.executable, "-m", how, *program, f"--job.dump_folder={folder}", *ENDLESS])
        with adopted_orphans(), log.open("w") as output:
            shell = subprocess.Popen(
                ["bash", "-c", f"{command}; echo code $?"], cwd=REPOSITORY, stdout=output, stderr=output
            )
            deadline = time.monotonic() + PATIENCE_SECONDS
            while steps_taken(folder) < 3:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            [launcher] = children(shell.pid)
            orphans = children(launcher)
            os.kill(launcher, signal.SIGKILL)
            assert shell.wait(PATIENCE_SECONDS) == 0
            check_orphans(log, orphans, folder)
        assert f"code {128 + signal.SIGKILL}" in log.read_text()


@pytest.mark.deep  # by default tests/ranks/runtime/test_watchdog.py stops ranks, without a launcher
def test_a_hung_rank_is_named_with_what_it_was_doing_and_the_job_restarts(
    start: Callable[..., LaunchedJob], long_toml: Path, uninterrupted: list[float]
) -> None:
    """Rank 0, which holds the store through which ranks hear of each other."""
    limits = ("--job.timeout_seconds=15", "--job.startup_timeout_seconds=120", "--job.max_restarts=1")
    folder, hung, other = long_toml.parent / "hang", 0, 1
    job = start(long_toml, f"--job.dump_folder={folder}", *limits)
    job.wait_for(lambda: steps_taken(folder) >= 7)
    job.signal_rank(hung, signal.SIGSTOP)
    assert job.wait() == 0, job.log.read_text()
    output = job.log.read_text()
    assert re.search(rf"no sign of life from rank {hung} for \d+ s: rank {other} was \w.*; the job is ended", output)
    # Beats are seconds apart: its last one may be older than its first step.
    where = r"Last heard on \S+, pid \d+: (step \d+|before its first step), \w+"
    assert re.search(rf"rank {hung} has ended or is stopped\. {where}", output), output
    recorded = json.loads((folder / "flight_recorder" / f"rank-{other}.json").read_text())
    assert recorded["entries"][-1]["profiling_name"].startswith("gloo:")
    check_whole(folder, uninterrupted)


@deep_rows(
    ("override", "code", "said"),
    [("--model={weights}", 3, "error: step 1 "), ("--data.text_field=none", 2, "error: ")],
    default=[("--data.text_field=none", 2, "error: ")],
)
def test_a_message_of_a_rank_is_the_last_thing_on_the_screen_said_once_and_no_rank_starts_again(
    start: Callable[..., LaunchedJob], long_toml: Path, tmp_path: Path, override: str, code: int, said: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "so"}\n' * 9)
    source = ("--data.source=jsonl", f"--data.path={rows}") if code == 2 else ()
    if code == 3:
        save_model("mistral, no window", tmp_path / "weights")
        weights = load_file(tmp_path / "weights" / "model.safetensors")
        weights["model.norm.weight"][0] = torch.nan
        save_file(weights, tmp_path / "weights" / "model.safetensors", {"format": "pt"})
        override = f'--model={{hub_checkpoint = "{tmp_path}/weights"}}'
    job = start(long_toml, f"--job.dump_folder={tmp_path / 'run'}", *source, override)
    assert job.wait() == code, job.log.read_text()
    output = job.log.read_text()
    assert output.splitlines()[-2].startswith(said), output
    assert output.splitlines()[-1].startswith("  fix: "), output
    assert output.count("error: ") == output.count("  fix: ") == 1, output
    assert not any(unwanted in output for unwanted in ("Traceback", "frame #", "lost contact", "exitcode")), output


@pytest.mark.deep
def test_a_second_job_on_the_same_folder_is_refused_once_and_the_first_goes_on(
    start: Callable[..., LaunchedJob], long_toml: Path, uninterrupted: list[float]
) -> None:
    folder = long_toml.parent / "twice"
    first = start(long_toml, f"--job.dump_folder={folder}")
    first.wait_for(lambda: steps_taken(folder) >= 2)
    first.signal_rank(0, signal.SIGSTOP)
    second = start(long_toml, f"--job.dump_folder={folder}")
    assert second.wait() == 2
    output = second.log.read_text()
    assert output.count(f"another job is training in job.dump_folder = '{folder}'") == 1, output
    assert 'Traceback (most recent call last):\n  File "' + str(REPOSITORY) not in output
    first.signal_rank(0, signal.SIGCONT)
    assert first.wait() == 0, first.log.read_text()
    check_whole(folder, uninterrupted)


@pytest.fixture
def small_disk(long_toml: Path) -> Iterator[Path]:
    """A run's folder on a file system of its own, with room for four checkpoints."""
    folder = long_toml.parent / "small-disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may mount no file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that leaves no room, or one that has grown so."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return ballast


def newest(checkpoints: Path) -> int:
    """Step of the newest complete checkpoint; 0 if there is none."""
    return max((int(path.name[5:]) for path in checkpoints.glob("step-*[0-9]")), default=0)


@pytest.mark.deep
def test_a_run_survives_a_full_disk_and_cannot_start_on_one(
    small_disk: Path, long_toml: Path, uninterrupted: list[float]
) -> None:
    checkpoints = small_disk / "checkpoints"
    settings = (f"--job.dump_folder={small_disk}", "--checkpoint.keep=1", "--metrics.tensorboard=true")
    job = ForkedJob(2, long_toml, *settings)
    job.wait_for(lambda: newest(checkpoints) >= 2)
    ballast = fill(small_disk)
    # The last page of each file has room for some lines yet.
    job.wait_for(lambda: job.says("metrics.jsonl: No space left on device. Training goes on; lines are kept"))
    job.wait_for(lambda: job.says("TensorBoard is off until the run's next start"))
    good, taken = newest(checkpoints), steps_taken(small_disk)
    ballast.unlink()
    job.wait_for(lambda: steps_taken(small_disk) > taken + 1)
    job.wait_for(lambda: newest(checkpoints) > good)
    fill(small_disk)
    job.forget()
    job.wait_for(lambda: job.says("NO CHECKPOINT"))
    good = newest(checkpoints)
    job.signal_rank(1, signal.SIGKILL)
    job.end()
    told = job.log.read_text()
    assert "TensorBoard is off until the run's next start" in told
    assert all("No space left on device" in line for line in told.splitlines() if "NO CHECKPOINT" in line)
    assert steps_taken(small_disk) < STEPS, "killed before the end"

    # What a save had written before there was no room was cleared away.
    fill(small_disk)
    refused = ForkedJob(2, long_toml, *settings)
    assert refused.wait() == [2, 2], refused.log.read_text()
    assert f"job.dump_folder = '{small_disk}' cannot be written: No space left on device" in refused.log.read_text()
    assert newest(checkpoints) == good

    ballast.unlink()
    again = ForkedJob(2, long_toml, *settings)
    assert again.wait() == [0, 0], again.log.read_text()
    assert again.says(f"resumed from {checkpoints}/step-{good}:"), again.log.read_text()
    check_whole(small_disk, uninterrupted)
    assert newest(checkpoints) == STEPS


@pytest.mark.deep
def test_a_checkpoint_folder_removed_during_a_save_is_reported_and_made_again(
    long_toml: Path, uninterrupted: list[float]
) -> None:
    folder = long_toml.parent / "removed"
    checkpoints = folder / "checkpoints"
    job = ForkedJob(2, long_toml, f"--job.dump_folder={folder}")

    def remove_in_a_save() -> bool:
        if steps_taken(folder) >= 5 and list(checkpoints.glob("*.partial")):
            shutil.rmtree(checkpoints, ignore_errors=True)
        return job.says("NO CHECKPOINT")

    job.wait_for(remove_in_a_save)
    assert job.wait() == [0, 0], job.log.read_text()
    assert re.search(r"NO CHECKPOINT of step \d+ was written.*(No such file|is not there)", job.log.read_text())
    check_whole(folder, uninterrupted)
    assert newest(checkpoints) == STEPS
