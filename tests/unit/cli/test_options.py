"""What commands share: numbers in range, output that can be encoded, errors of the system."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from tests.support.runs import write_run
from torchtitan_cp.__main__ import main
from torchtitan_cp.cli.command import run_command
from torchtitan_cp.data.corpus.store import append_to


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["check", "x.toml", "--ranks", "0"], "less than 1"),
        (["doctor", "x.toml", "--length", "-5"], "less than 0"),
        (["plan", "x.toml", "--nodes", "0"], "less than 1"),
        (["plan", "x.toml", "--inter-bandwidth", "inf"], "not a number up to 2^62"),
        (["evaluate", "run", "--depths", "0"], "less than 1"),
        (["evaluate", "run", "--lengths", "0"], "less than 1"),
        (["generate", "run", "--chat", "--temperature", "-1"], "less than 0"),
        (["generate", "run", "--chat", "--temperature", "nan"], "not a number up to 2^62"),
        (["generate", "run", "--chat", "--seed", f"{2**80}"], "not a number up to 2^62"),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_option(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert f"argument {arguments[-2]}: {arguments[-1]} is {why}" in capsys.readouterr().err


def test_what_the_encoding_of_the_output_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train, "start_ranks", lambda seconds: None)
    monkeypatch.setattr(train, "run_doctor", lambda *_: print("\u2265 4K") or True)
    for work in (
        lambda: train.main([str(write_run(tmp_path)), "--doctor"]),
        lambda: run_command(lambda: print("\u2265")),
    ):
        output = io.TextIOWrapper(io.BytesIO(), "latin-1")
        monkeypatch.setattr(sys, "stdout", output)
        assert not work()
        output.flush()
        assert output.buffer.getvalue().startswith(b"\\u2265")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (
            lambda: os.rmdir("cache/gone"),
            "cache/gone: No such file or directory\n  fix: check the disk",
        ),
        (lambda: append_to(Path("/dev/full"), b"."), "/dev/full: No space left on device\n  fix: check the disk"),
        (
            lambda: Path("/dev/full").write_text("."),
            "No space left on device\n  fix: check the disk",
        ),
    ],
)
def test_a_disk_that_fails_is_one_message_with_the_file_and_the_launcher_may_try_again(
    write: Callable[[], int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(train, "start_ranks", lambda seconds: None)
    monkeypatch.setattr(train, "run", lambda *_: write())
    assert train.main([str(write_run(tmp_path))]) == 1
    assert capsys.readouterr().err.startswith(f"[rank 0] error: {said}")
    assert run_command(write) == 1
    assert capsys.readouterr().err.startswith(f"error: {said}")
