"""The run's folder: judged without a trace, and made by a start."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.run_folder import START_BYTES, check_run_folder, prepare_run_folder

BOTH = pytest.mark.parametrize("check", [check_run_folder, prepare_run_folder])


@BOTH
def test_a_folder_that_cannot_be_made_or_written_is_refused(tmp_path: Path, check: Callable[[str], None]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"job.dump_folder = .*file/run' cannot be written: Not a directory"):
        check(str(tmp_path / "file" / "run"))
    run = tmp_path / "new" / "run"
    prepare_run_folder(str(run))
    assert list(run.iterdir()) == []
    check(str(run))
    (run / "config.toml").mkdir()
    with pytest.raises(ConfigError, match=r"job.dump_folder = .*run' cannot be written: config.toml: Is a directory"):
        check(str(run))
    (run / "config.toml").rmdir()
    (run / "checkpoints").touch()
    with pytest.raises(ConfigError, match=r"job.dump_folder = .*run' cannot be written: checkpoints: File exists"):
        check(str(run))


def test_a_folder_is_judged_without_being_made(tmp_path: Path) -> None:
    check_run_folder(str(tmp_path / "new" / "run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("disk", "said"),
    [
        ({"f_bavail": 0, "f_bfree": 0}, "No space left on device"),
        ({"f_ffree": 0}, "No space left on device"),
        ({"f_blocks": 0, "f_bavail": 0, "f_bfree": 0, "f_files": 0, "f_ffree": 0}, ""),
        ({}, ""),
    ],
    ids=["no room", "no more files", "neither is counted", "room"],
)
def test_a_full_disk_is_found_by_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: dict[str, int], said: str
) -> None:
    room = {"f_blocks": 100, "f_bavail": 20, "f_bfree": 20, "f_frsize": START_BYTES // 16, "f_files": 9, "f_ffree": 1}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**{"f_flag": 0, **room, **disk}))
    if not said:
        return check_run_folder(str(tmp_path))
    with pytest.raises(ConfigError, match=f"cannot be written: {said}\n  fix: free some space, or give a folder"):
        check_run_folder(str(tmp_path))


@pytest.mark.parametrize(("flag", "said"), [(os.ST_RDONLY, "Read-only file system"), (0, "Permission denied")])
def test_a_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, said: str
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    room = dict.fromkeys(("f_blocks", "f_bavail", "f_bfree", "f_frsize", "f_files", "f_ffree"), 2**20)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flag, **room))
    with pytest.raises(ConfigError, match=f"cannot be written: {said}"):
        check_run_folder(str(tmp_path / "run"))
