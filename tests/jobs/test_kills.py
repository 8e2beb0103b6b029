"""Ranks killed at any moment: the resumed run reads every sample once, with the losses of an undisturbed run."""

import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.curricula import MIXED
from tests.support.half_made import shrink
from tests.support.jobs import ForkedJob, Kill, kill_at, lines_of
from tests.support.runs import losses, write_run
from torchtitan_cp.training.trainer import Trainer

pytestmark = [pytest.mark.jobs, pytest.mark.deep]

# Three stages of two sources, a context-parallel degree of its own in the second.
STEPS_A_STAGE = 10
STAGE_ENDS = (STEPS_A_STAGE, 2 * STEPS_A_STAGE)
TOTAL = 3 * STEPS_A_STAGE
# As in training of some size, saves are frequent beside the time of a step: most moments lie in or beside one.
LONGER = (
    *(f"--curriculum.stages[{stage}].steps={STEPS_A_STAGE}" for stage in range(3)),
    "--curriculum.stages[1].global_batch_tokens=512",
    "--checkpoint.interval=2",
    "--job.timeout_seconds=60",
)

Record = dict[tuple[int, int, int], Any]


def record_samples(folder: Path) -> None:
    """On a rank: write the (stage, step, sample, its text) of all that it trains on from now on."""
    forward_backward = Trainer.forward_backward
    file = os.open(folder / f"samples-{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def recorded(trainer: Trainer, batches: Any) -> Any:
        progress, samples = trainer.progress, trainer.data_pipeline.samples
        numbers = [number for batch in batches for number in batch.numbers]
        rows = [[progress.stage, progress.stage_step, n, str(samples.sequence(n).spans)] for n in numbers]
        # At once, so that a kill leaves whole lines.
        os.write(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return forward_backward(trainer, batches)

    Trainer.forward_backward = recorded  # type: ignore[method-assign]


def tokenize_slowly(folder: Path) -> None:
    """The same, and on the way to tokens commit every two thousand."""
    shrink()
    record_samples(folder)


def samples_of(folder: Path) -> Record:
    """All that any rank read at any time: what is read again after a kill is what was read before."""
    found: Record = {}
    for path in folder.glob("samples-*"):
        for line in path.read_text().splitlines():
            stage, step, number, text = json.loads(line)
            assert found.setdefault((stage, step, number), text) == text
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("kills"), MIXED)


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> tuple[list[float], Record]:
    folder = config.parent / "undisturbed"
    folder.mkdir()
    settings = (f"--job.dump_folder={folder}", *LONGER, "--checkpoint.enable=false")
    job = ForkedJob(2, config, *settings, before=partial(record_samples, folder))
    assert job.wait() == [0, 0], job.log.read_text()
    return losses(lines_of(folder)), samples_of(folder)


def storm(
    config: Path,
    folder: Path,
    kills: Sequence[Kill],
    sizes: Sequence[int],
    seed: int,
    before: Callable[[Path], None] = record_samples,
) -> None:
    """The same command again and again, on as many ranks as `sizes` say in turn, with one of them killed each time."""
    folder.mkdir()
    draw = random.Random(seed)
    command = (f"--job.dump_folder={folder}", f"--data.cache_folder={folder}/cache", *LONGER)
    turns = itertools.cycle(sizes)
    for kill, size in zip(kills, turns, strict=False):
        job = ForkedJob(size, config, *command, before=partial(before, folder))
        try:
            assert kill_at(job, kill, folder, STAGE_ENDS, draw, size), job.log.read_text()
        finally:
            job.end()
    size = next(turns)
    job = ForkedJob(size, config, *command, before=partial(record_samples, folder))
    assert job.wait() == [0] * size, job.log.read_text()


def check_whole(folder: Path, undisturbed: tuple[list[float], Record], tolerance: float) -> None:
    """Every step once, with these losses; every sample of each step, and no other."""
    lines, (wanted, samples) = lines_of(folder), undisturbed
    assert [line["step"] for line in lines] == list(range(1, TOTAL + 1))
    assert losses(lines) == (wanted if not tolerance else pytest.approx(wanted, rel=tolerance))
    assert samples_of(folder) == samples


def random_kills(count: int, seed: int) -> list[Kill]:
    """Of each ten three in steps, in saves and between stages, and one at a start, at random steps."""
    draw = random.Random(seed)
    moments = list(itertools.islice(itertools.cycle(["step", "save", "transition"] * 3 + ["start"]), count))
    kills = [
        Kill(draw.choice(STAGE_ENDS) if moment == "transition" else draw.randrange(1, TOTAL - 5), moment)
        for moment in moments
    ]
    return sorted(kills, key=lambda kill: kill.after)


def test_random_kills_lose_no_step_and_no_sample(config: Path, undisturbed: tuple[list[float], Record]) -> None:
    folder = config.parent / "storm"
    kills = random_kills(10, seed=1)
    storm(config, folder, kills, sizes=[2], seed=1)
    check_whole(folder, undisturbed, tolerance=0.0)


def test_a_run_killed_within_and_between_stages_resumes_on_other_ranks_with_the_same_samples(
    config: Path, undisturbed: tuple[list[float], Record]
) -> None:
    folder = config.parent / "other-ranks"
    kills = [
        Kill(0, "tokenizing"),
        Kill(0, "start"),
        Kill(STAGE_ENDS[0] // 2, "save"),
        Kill(STAGE_ENDS[0], "transition"),
        Kill(STAGE_ENDS[0] + 4, "step"),
        Kill(STAGE_ENDS[1], "transition"),
        Kill(STAGE_ENDS[1] + 4, "save"),
    ]
    storm(config, folder, kills, sizes=[2, 4, 1], seed=2, before=tokenize_slowly)
    check_whole(folder, undisturbed, tolerance=1e-4)
