"""Notes that ranks leave for their launcher."""

import os
from pathlib import Path

import pytest

from torchtitan_cp.runtime import job_notes
from torchtitan_cp.runtime.job_notes import FOLDER_VARIABLE, EndNote


def test_without_a_launcher_rank_0_says_why_a_run_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert job_notes.end_job(f"error: of {rank}", 2) == 2
    assert capsys.readouterr().err == "error: of 0\n"


def test_the_launcher_reads_the_note_of_the_first_rank_to_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(job_notes, "WAIT_SECONDS", 0.0)
    for rank in (3, 0):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert job_notes.end_job(f"error: of {rank}", 3) == 3
        os.utime(tmp_path / f"end-{rank}", times=(100 - rank, 100 - rank))
    assert capsys.readouterr().err == ""
    assert [note for _, note in job_notes.end_notes(tmp_path)] == [EndNote(3, "error: of 3"), EndNote(3, "error: of 0")]


def test_a_rank_that_cannot_leave_a_note_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert job_notes.end_job("error: no room", 2) == 2
    assert capsys.readouterr().err.endswith("error: no room\n")


def test_a_relaunch_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    job_notes.ask_for_relaunch()
    assert job_notes.take_relaunch(tmp_path)
    assert not job_notes.take_relaunch(tmp_path)
