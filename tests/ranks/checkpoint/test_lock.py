"""One job on a run's folder, and one folder for all of its nodes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.rank_pool import RankPool
from torchtitan_cp.checkpoint import lock
from torchtitan_cp.checkpoint.lock import run_dir_lock
from torchtitan_cp.config import ConfigError


def enter(folders: list[Path]) -> str:
    """On a rank, which is the first of a node that has its own folder: what refuses the job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        patch.setattr(lock, "SHARED_SECONDS", 0.5)
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
