"""Ctrl-C once, twice, and a kill, each at five moments of a job: exit code, last line, and nothing is lost."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.jobs import ForkedJob, Job, LaunchedJob, children, lines_of, steps_taken
from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, losses, train, write_run
from torchtitan_cp.metrics.jsonl_sink import EVALUATION_FILE
from torchtitan_cp.runtime.signals import SAME_PRESS_SECONDS

pytestmark = [pytest.mark.jobs, pytest.mark.deep]

STAGE, STEPS = 12, 24
# Two stages, the second of longer sequences on both ranks. A whole evaluation takes some batches.
CONFIG = (
    TINY.replace("steps = 20", f"steps = {STAGE}").replace("[evaluation]\ntokens = 512", "[evaluation]\ntokens = 4096")
    + f"""
[[curriculum.stages]]
seq_len = 256
steps = {STEPS - STAGE}
global_batch_tokens = 512
cp = -1

[checkpoint]
interval = 4
"""
)
ENDED = "SIGINT: the ranks were ended; the same command resumes from the last checkpoint"
# Tokenized as one batch, which takes a thousand times as long as to see that it has begun.
ROWS = 100_000


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("stops"), CONFIG)


@pytest.fixture(scope="module")
def uninterrupted(ranks: Callable[[int], RankPool], config: Path) -> Path:
    folder = config.parent / "straight"
    ranks(2)(train, config, f"--job.dump_folder={folder}")
    return folder


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """The step and the held-out loss of each line of evaluation.jsonl."""
    lines = map(json.loads, (folder / EVALUATION_FILE).read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def press(job: LaunchedJob, times: int) -> None:
    """Ctrl-C as a terminal sends it, to the launcher, while rank 0 is held still."""
    job.forget()
    job.signal(signal.SIGINT)
    job.wait_for(lambda: job.says("SIGINT: the ranks finish their step, save and stop; Ctrl-C again ends them at once"))
    if times == 2:
        time.sleep(SAME_PRESS_SECONDS + 0.1)
        job.signal(signal.SIGINT)
    else:
        job.signal_rank(0, signal.SIGCONT)


def stop_three_ways(
    config: Path, folder: Path, moments: list[Callable[[Job], bool]], *settings: str
) -> tuple[list[int], list[LaunchedJob]]:
    """Three starts of a job: each moment rank 0 is held, then comes Ctrl-C, Ctrl-C twice, and a SIGKILL of rank 1.

    Returns:
        exit codes, and the jobs.
    """
    codes, jobs = [], []
    for number, is_there in enumerate(moments):
        job = LaunchedJob(config, f"--job.dump_folder={folder}", "--job.max_restarts=0", *settings)
        jobs.append(job)
        try:
            job.wait_for(lambda: is_there(job))  # noqa: B023
            assert not job.ended(), job.log.read_text()
            job.signal_rank(0, signal.SIGSTOP)
            ranks = children(job.pid)
            assert len({os.getsid(process) for process in (job.pid, *ranks)}) == 3, "a terminal reaches the launcher"
            if number < 2:
                press(job, times=number + 1)
            else:
                job.signal_rank(1, signal.SIGKILL)
                job.signal_rank(0, signal.SIGCONT)
            codes.append(job.wait())
        finally:
            job.kill()
        assert not any(Path(f"/proc/{process}").exists() for process in ranks)
    return codes, jobs


def last_line(job: Job) -> str:
    return job.log.read_text().splitlines()[-1]


def check_stops(codes: list[int], jobs: list[LaunchedJob], stopped: str) -> None:
    """Exit codes and last lines; `stopped` is said after one Ctrl-C, by a rank."""
    assert codes == [0, 128 + signal.SIGINT, 1], [job.log.read_text() for job in jobs]
    once, twice, killed = (job.log.read_text() for job in jobs)
    assert stopped in once
    assert twice.splitlines()[-1] == ENDED
    assert "exitcode  : -9" in killed
    assert not any("Traceback" in said or "frame #" in said for said in (once, twice)), once + twice


def check_whole(config: Path, folder: Path, uninterrupted: Path, *settings: str) -> str:
    """The next start trains to the end: each step and evaluation once, with its numbers. Returns what it says."""
    job = ForkedJob(2, config, f"--job.dump_folder={folder}", *settings)
    assert job.wait() == [0, 0], job.log.read_text()
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert losses(lines) == losses(lines_of(uninterrupted))
    assert evaluations(folder) == evaluations(uninterrupted)
    return job.log.read_text()


def test_while_ranks_start(config: Path, uninterrupted: Path) -> None:
    folder = config.parent / "start"
    moments = [lambda job: job.rank(0) is not None and job.rank(1) is not None] * 3
    codes, jobs = stop_three_ways(config, folder, moments)
    check_stops(codes, jobs, "stopped by a signal before the first step; there is nothing to save")
    check_whole(config, folder, uninterrupted)


def test_while_the_corpus_is_tokenized(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    path = write_run(tmp_path, CONFIG.replace('source = "text"', 'source = "jsonl"'))
    rows = [json.dumps({"text": f"row {number}"}) + "\n" for number in range(ROWS)]
    (tmp_path / "corpus" / "rows.jsonl").write_text("".join(rows))
    straight, folder = tmp_path / "straight", tmp_path / "tokenizing"
    ranks(2)(train, path, f"--job.dump_folder={straight}", f"--data.cache_folder={tmp_path / 'whole'}")
    codes, jobs = stop_three_ways(path, folder, [lambda job: job.says("preparing corpus")] * 3)
    check_stops(codes, jobs, "asked to stop: the run ends (now preparing the corpus)")
    assert last_line(jobs[0]).startswith("stopped while tokenizing: ")
    check_whole(path, folder, straight)


def test_in_a_step(config: Path, uninterrupted: Path) -> None:
    folder = config.parent / "step"
    moments = [lambda job, first=first: steps_taken(folder) >= first for first in (3, 7, 10)]  # type: ignore[misc]
    codes, jobs = stop_three_ways(config, folder, moments)
    check_stops(codes, jobs, f" of {STEPS}; the state is saved. Run the same command again to resume.")
    check_whole(config, folder, uninterrupted)


def test_in_a_save(config: Path, uninterrupted: Path) -> None:
    folder, often = config.parent / "save", "--checkpoint.interval=1"

    def is_saving(job: Job, first: int) -> bool:
        return steps_taken(folder) >= first and bool(list((folder / "checkpoints").glob("*.partial")))

    moments = [lambda job, first=first: is_saving(job, first) for first in (3, 6, 9)]  # type: ignore[misc]
    codes, jobs = stop_three_ways(config, folder, moments, often)
    check_stops(codes, jobs, f" of {STEPS}; the state is saved. Run the same command again to resume.")
    check_whole(config, folder, uninterrupted, often)


@pytest.mark.parametrize("stage", [1, 2])
def test_in_the_evaluation_of_a_stages_end(config: Path, uninterrupted: Path, stage: int) -> None:
    """The last step is saved before it, so that no start takes a step of the stage again; the last one evaluates it."""
    folder, step = config.parent / f"evaluation-{stage}", stage * STAGE
    evaluating = f"stage {stage} is trained; evaluating after step {step}"
    codes, jobs = stop_three_ways(config, folder, [lambda job: job.says(evaluating)] * 3)
    check_stops(codes, jobs, f"stopped by a signal after step {step} of {STEPS}; the state is saved.")
    told = jobs[0].log.read_text()
    assert f"asked to stop: the run ends after step {step} (now evaluating with the others)" in told
    assert "evaluation stopped: the run is stopping; the next start runs it" in told
    for job in jobs[1:]:
        assert f"step-{step}: {step} of {STEPS} steps are done" in job.log.read_text()
        assert steps_taken(folder) == step
    assert evaluations(folder) == evaluations(uninterrupted)[: stage - 1]
    assert evaluating in check_whole(config, folder, uninterrupted)
