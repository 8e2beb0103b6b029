"""One job on a run's folder, and one folder for all of its nodes."""

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.rank_pool import RankPool
from torchtitan_cp.config import ConfigError
from torchtitan_cp.runtime import lock, nodes
from torchtitan_cp.runtime.lock import run_dir_lock


def enter(folders: list[Path], ranks_per_node: int = 1) -> str:
    """On a rank with a folder of its own: what refuses the job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(dist.get_rank() % ranks_per_node))
        patch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_node))
        patch.setattr(nodes, "SHARED_SECONDS", 0.5)
        try:
            with run_dir_lock(folders[dist.get_rank()]):
                dist.barrier()
                return ""
        except ConfigError as error:
            return str(error)


def test_a_folder_that_nodes_do_not_share_is_refused_before_training(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    assert ranks(2)(enter, [shared, shared]) == ["", ""]
    other.mkdir()
    (other / ".lock").write_bytes((shared / ".lock").read_bytes())  # of an earlier start
    for refused in ranks(2)(enter, [shared, other]):
        assert "is not shared: on " in refused


def enter_with_a_disk_filled_since(folder: Path) -> str:
    """On a rank: what refuses the job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock.os, "write", lambda *_: Path("/dev/full").write_text("."))
        return enter([folder])


def test_a_lock_needs_no_room_on_the_disk(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    assert ranks(1)(enter_with_a_disk_filled_since, tmp_path) == [""]


def test_a_job_on_several_nodes_waits_for_the_lock_of_a_lost_node_and_names_the_holder_otherwise(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    with (tmp_path / ".lock").open("w") as held:
        held.write("pid 7 on node7\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        for refused in ranks(2)(enter, [tmp_path, tmp_path], 2):
            assert f"another job is training in job.dump_folder = '{tmp_path}' (pid 7 on node7)" in refused
        threading.Timer(1.5, held.close).start()
        assert ranks(2)(enter, [tmp_path, tmp_path]) == ["", ""]
