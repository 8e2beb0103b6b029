"""Ranks that lose each other, and ranks that would not run the same thing."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.rank_pool import RankFailure, RankPool
from torchtitan_cp.config import load_config
from torchtitan_cp.runtime import watchdog as failure
from torchtitan_cp.runtime.consistency import check_same_job, code_version
from torchtitan_cp.runtime.watchdog import LostRankError, Watchdog, name_lost_ranks, set_activity

BATCH, STEP = "waiting for its batch", "in forward, backward and update with the others"


def lose_contact(folder: Path) -> tuple[int, str]:
    lines: list[str] = []
    failure.logger.error = lambda message, *values: lines.append(message % values)  # type: ignore[method-assign]
    set_activity(STEP, 4, 60.0)
    message = ""
    with Watchdog(dist.get_rank(), dist.get_world_size(), 0.2, folder) as watch:
        dist.barrier()
        try:
            with name_lost_ranks(watch):
                raise RuntimeError("[gloo] Connection closed by peer [10.0.0.1]:42\nmore")
        except LostRankError as error:
            message = str(error)
        dist.barrier()
    assert message == "[gloo] Connection closed by peer [10.0.0.1]:42"
    return len(lines), "\n".join(lines)


def test_lost_contact_is_told_by_one_rank_with_the_places_of_all(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    answers = ranks(2)(lose_contact, tmp_path)
    assert sorted(count for count, _ in answers) == [0, 1]
    text = max(text for _, text in answers)
    assert "lost contact with another rank ([gloo] Connection closed by peer [10.0.0.1]:42)" in text
    assert f"step 4, {STEP}" in text
    assert sorted(path.name for path in (tmp_path / "flight_recorder").iterdir()) == ["rank-0.json", "rank-1.json"]


class GoneStore:
    """Went with the rank that held it."""

    asked = 0

    def __getattr__(self, method: str) -> Callable[..., None]:
        def ask(*arguments: object) -> None:
            GoneStore.asked += 1
            raise dist.DistNetworkError("Broken pipe")

        return ask


def lose_the_store(folder: Path) -> tuple[list[str], int]:
    lines: list[str] = []
    failure.logger.error = lambda message, *values: lines.append(message % values)  # type: ignore[method-assign]
    set_activity(STEP, 4, 60.0)
    with Watchdog(dist.get_rank(), dist.get_world_size(), 0.1, folder) as watch:
        dist.barrier()
        while 0 not in watch._known or watch._known[0].step != 4:
            time.sleep(0.01)
        dist.barrier()
        if dist.get_rank() == 1:
            watch._store = GoneStore()
            watch.report("lost contact with another rank")
        dist.barrier()
    return lines, GoneStore.asked


def test_the_rank_that_held_the_store_is_told_by_what_it_last_said(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    _, (lines, asked) = ranks(2)(lose_the_store, tmp_path)
    assert len(lines) == 1
    assert re.search(rf"rank 0 is dead, stopped or cut off\. Last heard on \S+, pid \d+: step 4, {STEP}", lines[0])
    assert f": step 4, {STEP}" in lines[0].splitlines()[-1]
    assert lines[0].splitlines()[-1].startswith("  rank 1 waits for the others on")
    assert asked <= 2, "once by the report or the thread, or by both at the same time"


# Ranks that would not run the same thing -----------------------------------------------------------------------


def compare(paths: list[Path], sources: list[Path]) -> None:
    rank = dist.get_rank()
    check_same_job(load_config(paths[rank]), [sources[rank]])


@pytest.fixture
def configs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("one.toml", "other.toml")]
    for path in paths:
        path.write_text("[[curriculum.stages]]\nseq_len = 128\n")
    return paths


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / name / "package" for name in ("one", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "a.py").write_text("x = 1\n")
    return folders


def test_ranks_with_the_same_config_and_code_agree(
    ranks: Callable[[int], RankPool], configs: list[Path], sources: list[Path]
) -> None:
    ranks(2)(compare, configs, sources)


def test_ranks_with_different_configs_are_refused_with_the_difference(
    ranks: Callable[[int], RankPool], configs: list[Path], sources: list[Path]
) -> None:
    configs[1].write_text("training.seed = 5\n[[curriculum.stages]]\nseq_len = 256\n")
    with pytest.raises(
        RankFailure,
        match=r"(?s)rank 1 on \S+ differs from rank 0 on \S+: training.seed: 5, on rank 0 0; "
        r"curriculum.stages\[0\].seq_len: 256, on rank 0 128\n.*from the same files",
    ):
        ranks(2)(compare, configs, sources)


def test_ranks_with_different_code_are_refused(
    ranks: Callable[[int], RankPool], configs: list[Path], sources: list[Path]
) -> None:
    (sources[1] / "a.py").write_text("x = 2\n")
    with pytest.raises(RankFailure, match=r"from rank 0 on \S+: the code: '\w{12}', on rank 0 '\w{12}'"):
        ranks(2)(compare, configs, sources)
    (sources[1] / "a.py").write_text("x = 1\n")
    (sources[1] / "a.py").rename(sources[1] / "b.py")
    assert code_version([sources[0]]) != code_version([sources[1]])
