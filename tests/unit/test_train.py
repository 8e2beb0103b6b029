"""train.py, the program of a rank: its limits, logs and exit codes."""

import gc
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from tests.support.runs import write_run
from torchtitan_cp.__main__ import main
from torchtitan_cp.cli import train as command
from torchtitan_cp.runtime.job_notes import FOLDER_VARIABLE


def test_a_system_error_of_no_file_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train, "start_ranks", lambda seconds: os.getpgid(2**22))
    with pytest.raises(ProcessLookupError):
        train.main([str(write_run(tmp_path))])


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
