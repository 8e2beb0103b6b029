"""Runs on conversations that are kept whole: stopped and resumed on other ranks, they read the same text."""

import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rank_pool import RankPool
from tests.support.runs import losses, prepared, train, write_conversations
from torchtitan_cp.config.stages import CONVERSATIONS

WINDOWS = ("--data.packing_window=3", "--curriculum.stages[0].steps=4", "--checkpoint.interval=2")


@pytest.fixture(scope="module")
def straight(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    path = write_conversations(tmp_path_factory.mktemp("whole"))
    return path, losses(ranks(1)(train, path, *WINDOWS)[0])


def stopped_copy(path: Path, name: str) -> str:
    """The straight run as if it had died after its second step, in the middle of a window."""
    folder = path.parent / name
    shutil.copytree(path.parent / "run", folder)
    shutil.rmtree(folder / "checkpoints" / "step-4")
    return f"--job.dump_folder={folder}"


def test_conversations_are_read_the_same_after_a_resume_on_other_ranks(
    ranks: Callable[[int], RankPool], straight: tuple[Path, list[float]]
) -> None:
    path, expected = straight
    other = (stopped_copy(path, "two-ranks"), *WINDOWS)
    assert losses(ranks(2)(train, path, *other)[0]) == pytest.approx(expected, rel=1e-4)


def warnings_of_resuming(path: Path, *overrides: str) -> list[str]:
    """On a rank: what the resume of a run warns of whose checkpoint is from when conversations were cut."""
    trainer, said = prepared(path, *overrides), list[str]()
    assert trainer.saved
    folder, progress = trainer.saved
    settings = {name: value for name, value in progress.text_settings.items() if name != CONVERSATIONS}
    assert settings != progress.text_settings
    trainer.saved = folder, dataclasses.replace(progress, text_settings=settings)
    logger, handler = logging.getLogger("torchtitan_cp.training.resume"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        trainer.resume()
    finally:
        logger.removeHandler(handler)
    return said


def test_a_stage_that_began_when_conversations_were_cut_says_that_it_reads_on_otherwise(
    ranks: Callable[[int], RankPool], straight: tuple[Path, list[float]]
) -> None:
    path, _ = straight
    [line] = ranks(1)(warnings_of_resuming, path, stopped_copy(path, "cut"), *WINDOWS)[0]
    assert line.startswith("stage 1 reads its text differently from here on, and may skip some or read some twice: ")
    assert line.endswith("conversations cut to fill sequences -> whole")
