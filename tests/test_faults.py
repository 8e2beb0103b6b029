"""Numbers that are not finite, full disks, killed and stopped ranks, signals: nothing is poisoned, lost or repeated."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ranks import RankFailure, RankPool
from tests.runs import TINY, losses, prepared, train, write_run
from torchtitan_cp.checkpoint import writer
from torchtitan_cp.launch import children

POISONED_STEP = 3


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("faults"))


def train_with_fault(path: Path, where: str, steps: int, *overrides: str) -> tuple[list[float | None], list[Tensor]]:
    """On a rank: a run in which rank 1 makes a NaN in `steps` steps from the third on.

    Returns the losses, and the weights before and after the poisoned steps.
    """
    trainer = prepared(path, *overrides)
    block = trainer.network.parts[0].layers["1"].feed_forward.w2
    poison = range(POISONED_STEP - 1, POISONED_STEP - 1 + steps)

    def ill() -> bool:
        return trainer.world.rank == 1 and trainer.progress.step in poison

    if where == "forward":
        block.register_forward_hook(lambda module, inputs, out: out * float("nan") if ill() else out)
    else:
        hook = lambda gradient: gradient * float("inf") if ill() else gradient  # noqa: E731
        block.register_forward_hook(
            lambda module, inputs, out: (out.register_hook(hook) if out.requires_grad else 0, out)[1]
        )

    snapshots = []
    update = trainer._update_or_skip

    def watched(*arguments: object) -> bool:
        before = [p.to_local().clone() for p in trainer.network.parts[0].parameters()]
        moments = [
            s.to_local().clone() for state in trainer.network.optimizers[0].state.values() for s in (state["exp_avg"],)
        ]
        skipped = update(*arguments)
        if skipped:
            after = [p.to_local() for p in trainer.network.parts[0].parameters()]
            after_moments = [state["exp_avg"].to_local() for state in trainer.network.optimizers[0].state.values()]
            snapshots.append(
                all(torch.equal(a, b) for a, b in zip(before + moments, after + after_moments, strict=True))
            )
        return skipped

    trainer._update_or_skip = watched  # type: ignore[method-assign, assignment]
    trainer.run()
    text = (trainer.folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return losses(lines), snapshots  # type: ignore[return-value]


@pytest.mark.parametrize(("where", "named"), [("forward", "the loss is nan"), ("backward", "the gradient at its")])
def test_halt_names_step_stage_rank_and_number(
    ranks: Callable[[int], RankPool], run_toml: Path, where: str, named: str
) -> None:
    folder = f"--job.dump_folder={run_toml.parent / where}"
    with pytest.raises(RankFailure, match=rf"step 3 \(stage 1, 128\) is not finite: rank 1: {named}"):
        ranks(2)(train_with_fault, run_toml, where, 1, folder)
    # What was before the step is saved first.
    assert [path.name for path in (run_toml.parent / where / "checkpoints").iterdir()] == ["step-2"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_skip_changes_neither_weights_nor_moments_on_any_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, where: str
) -> None:
    folder = f"--job.dump_folder={run_toml.parent / ('skip-' + where)}"
    answers = ranks(2)(train_with_fault, run_toml, where, 2, folder, "--health.on_nonfinite=skip")
    for values, unchanged in answers:
        assert [step for step, loss in enumerate(values, start=1) if loss is None] == [3, 4]
        assert len(values) == 20
        assert unchanged == [True, True]
        assert values[-1] < values[0]  # type: ignore[operator]


def test_too_many_skips_in_a_row_halt(ranks: Callable[[int], RankPool], run_toml: Path) -> None:
    folder = f"--job.dump_folder={run_toml.parent / 'limit'}"
    skip = ("--health.on_nonfinite=skip", "--health.max_consecutive_skips=2")
    with pytest.raises(RankFailure, match=r"step 5 .* Skipped 2 steps in a row before it"):
        ranks(2)(train_with_fault, run_toml, "forward", 3, folder, *skip)


# A disk that fails -------------------------------------------------------------------------------------------


def train_on_a_full_disk(path: Path, *overrides: str) -> tuple[list[float], list[str]]:
    """On a rank: a run in which rank 1 has no room from step 4 to step 11, at two of the saves."""
    trainer = prepared(path, *overrides)
    create = writer.SummingFileSystem.create_stream

    def create_stream(self: writer.SummingFileSystem, name: object, mode: str) -> object:
        if trainer.world.rank == 1 and 4 <= trainer.progress.step <= 11:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, name, mode)  # type: ignore[arg-type]

    writer.SummingFileSystem.create_stream = create_stream  # type: ignore[method-assign, assignment]
    try:
        trainer.run()
    finally:
        writer.SummingFileSystem.create_stream = create  # type: ignore[method-assign]
    lines = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
    return losses(lines), sorted(path.name for path in trainer.checkpoints.folder.iterdir())


def test_training_goes_on_over_a_full_disk_and_saves_again_when_there_is_room(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    settings = ("--checkpoint.interval=5", "--checkpoint.keep=9", "--checkpoint.asynchronous=false")
    straight = losses(ranks(2)(train, run_toml, f"--job.dump_folder={run_toml.parent / 'room'}")[0])
    full = ranks(2)(train_on_a_full_disk, run_toml, f"--job.dump_folder={run_toml.parent / 'full'}", *settings)
    assert full[0] == (straight, ["step-15", "step-20"])


def fail_at_the_end(path: Path, *overrides: str) -> None:
    trainer = prepared(path, *overrides)
    writer.SummingFileSystem.create_stream = None  # type: ignore[method-assign, assignment]
    trainer.run()


def test_a_run_whose_last_checkpoint_cannot_be_written_does_not_end_as_if_it_could(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    folder = f"--job.dump_folder={run_toml.parent / 'no-last'}"
    with pytest.raises(RankFailure, match=r"the last checkpoint, of step 20, could not be written to .*no-last"):
        ranks(2)(fail_at_the_end, run_toml, folder)


# Processes ---------------------------------------------------------------------------------------------------

REPOSITORY = Path(__file__).parents[1]
# 20 steps at 128 tokens, then 20 at 256; saved at every second step, so that most moments lie in or beside a save.
LONG = (
    TINY
    + """
[[curriculum.stages]]
seq_len = 256
steps = 20
global_batch_tokens = 512
cp = -1

[checkpoint]
interval = 2
"""
)
STEPS = 40
# For a machine that is busy with other things.
PATIENCE_SECONDS = 600.0


class Job:
    """A run as run_train.sh starts it, on two ranks, its output in a file.

    Args:
        path: the config.
        overrides: as on the command line.
    """

    def __init__(self, path: Path, *overrides: str) -> None:
        self.log = path.parent / f"log-{len(list(path.parent.glob('log-*')))}"
        command = [sys.executable, "-m", "torchtitan_cp.launch", "--standalone", "--nproc-per-node", "2", "--"]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, str(REPOSITORY / "train.py"), str(path), *overrides],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            )

    def wait(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.002)

    def rank(self, number: int) -> int | None:
        """Process id of a rank; None while it is not there."""
        for launcher in children(self.process.pid):
            for pid in children(launcher):
                try:
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if f"RANK={number}".encode() in environment:
                    return pid
        return None

    def signal_rank(self, number: int, which: signal.Signals) -> None:
        pid = self.rank(number)
        assert pid is not None
        os.kill(pid, which)

    def kill(self) -> None:
        """End it and all it started, if it has not ended."""
        if self.process.poll() is None:
            launchers = children(self.process.pid)
            for pid in [*launchers, *(rank for launcher in launchers for rank in children(launcher))]:
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Starts jobs, which do not outlive the test."""
    jobs: list[Job] = []
    yield lambda *arguments: (jobs.append(Job(*arguments)), jobs[-1])[1]  # type: ignore[func-returns-value]
    for job in jobs:
        job.kill()


def steps_taken(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def lines_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def long_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("long"), LONG)


@pytest.fixture(scope="module")
def uninterrupted(ranks: Callable[[int], RankPool], long_toml: Path) -> list[float]:
    return losses(ranks(2)(train, long_toml, f"--job.dump_folder={long_toml.parent / 'straight'}")[0])


def check_whole(folder: Path, uninterrupted: list[float]) -> None:
    """Every step once, with the losses of the run that nobody disturbed, and every token once."""
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert losses(lines) == uninterrupted
    assert [line["tokens"] for line in lines] == [512 * step for step in range(1, STEPS + 1)]


def storm(start: Callable[..., Job], path: Path, folder: Path, kills: int, seed: int) -> Job:
    """A run that goes on by itself after a random rank was killed at random moments. Returns it, ended."""
    draw = random.Random(seed)
    job = start(path, f"--job.dump_folder={folder}", f"--job.max_restarts={kills}")
    for kill in range(kills):
        target = (kill + draw.random()) * STEPS / kills
        job.wait_for(lambda target=target: steps_taken(folder) >= target)  # type: ignore[misc]
        time.sleep(draw.random() * 0.2)
        job.wait_for(lambda: job.rank(0) is not None and job.rank(1) is not None)
        killed = job.rank(draw.randrange(2))
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        job.wait_for(lambda killed=killed: killed not in (job.rank(0), job.rank(1)))  # type: ignore[misc]
    job.wait()
    return job


def test_a_rank_killed_at_random_moments_costs_no_step_and_the_run_goes_on_by_itself(
    start: Callable[..., Job], long_toml: Path, uninterrupted: list[float]
) -> None:
    folder = long_toml.parent / "storm"
    job = storm(start, long_toml, folder, kills=3, seed=1)
    assert job.process.returncode == 0, job.log.read_text()
    check_whole(folder, uninterrupted)
    assert job.log.read_text().count("resumed from") >= 2


def test_a_signal_ends_a_run_saved_with_exit_code_0_and_the_next_goes_on(
    start: Callable[..., Job], long_toml: Path, uninterrupted: list[float]
) -> None:
    """They arrive while a checkpoint is being written, and on the launcher, as a scheduler sends them."""
    folder, taken = long_toml.parent / "signals", 0
    checkpoints = folder / "checkpoints"
    for which in (signal.SIGTERM, signal.SIGUSR1):
        job = start(long_toml, f"--job.dump_folder={folder}", "--checkpoint.interval=1")
        job.wait_for(
            lambda wanted=taken + 3: steps_taken(folder) >= wanted and bool(list(checkpoints.glob("*.partial")))  # type: ignore[misc]
        )
        job.process.send_signal(which)
        assert job.wait() == 0, job.log.read_text()
        taken = steps_taken(folder)
        assert 3 <= taken < STEPS
        assert f"stopped by a signal after step {taken} of {STEPS}; the state is saved" in job.log.read_text()
        assert (checkpoints / f"step-{taken}" / "manifest.json").exists()
        assert not list(checkpoints.glob("*.partial"))
    job = start(long_toml, f"--job.dump_folder={folder}")
    assert job.wait() == 0, job.log.read_text()
    assert f"step-{taken}: {taken} of {STEPS} steps are done" in job.log.read_text()
    check_whole(folder, uninterrupted)


def test_a_rank_that_hangs_is_named_with_what_it_did_and_the_run_goes_on(
    start: Callable[..., Job], long_toml: Path, uninterrupted: list[float]
) -> None:
    folder = long_toml.parent / "hang"
    limits = ("--job.timeout_seconds=15", "--job.startup_timeout_seconds=120", "--job.max_restarts=1")
    job = start(long_toml, f"--job.dump_folder={folder}", *limits)
    job.wait_for(lambda: steps_taken(folder) >= 7)
    job.signal_rank(1, signal.SIGSTOP)
    assert job.wait() == 0, job.log.read_text()
    output = job.log.read_text()
    assert re.search(r"no progress in 15 s: rank 0 was \w.*; the job is ended", output), output
    # Beats are seconds apart: its last one may be older than its first step.
    heard = r"rank 1 is dead, stopped or cut off\. Last heard on \S+, pid \d+: (step \d+|before its first step), \w+"
    assert re.search(heard, output), output
    recorded = json.loads((folder / "flight_recorder" / "rank-0.json").read_text())
    assert recorded["entries"][-1]["profiling_name"].startswith("gloo:")
    check_whole(folder, uninterrupted)


def test_a_second_job_on_the_same_folder_is_refused_once_and_the_first_goes_on(
    start: Callable[..., Job], long_toml: Path, uninterrupted: list[float]
) -> None:
    folder = long_toml.parent / "twice"
    first = start(long_toml, f"--job.dump_folder={folder}")
    first.wait_for(lambda: steps_taken(folder) >= 2)
    first.signal_rank(0, signal.SIGSTOP)
    second = start(long_toml, f"--job.dump_folder={folder}")
    assert second.wait() != 0
    output = second.log.read_text()
    assert output.count(f"another job is training in job.dump_folder = '{folder}'") == 1, output
    assert 'Traceback (most recent call last):\n  File "' + str(REPOSITORY) not in output
    first.signal_rank(0, signal.SIGCONT)
    assert first.wait() == 0, first.log.read_text()
    check_whole(folder, uninterrupted)
