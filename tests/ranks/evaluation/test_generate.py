"""Text from a run that was just trained."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rank_pool import RankPool
from tests.support.runs import train, write_run
from torchtitan_cp.cli import generate as program


def test_a_person_can_talk_to_what_was_trained(
    ranks: Callable[[int], RankPool],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_run(tmp_path)
    ranks(2)(train, path, "--parallel.cp=2", "--curriculum.stages[0].steps=2", "--model.overrides.windows=[20, 0]")
    arguments = [str(tmp_path / "run"), "--prompt", "def ", "--max-tokens", "130"]
    assert program.main(arguments) == 0
    first = capsys.readouterr()
    assert first.out.startswith("def ")
    assert len(first.out) > 20
    assert "longer than the 128 tokens" in first.err
    monkeypatch.setattr("sys.stdin", io.StringIO("def \n"))
    assert program.main([*arguments, "--prompt", "-"]) == 0
    assert capsys.readouterr() == first
    assert program.main([*arguments, "--seed", "1"]) == 0
    assert capsys.readouterr().out != first.out
    assert program.main([*arguments, "--temperature", "0", "--prompt", ""]) == 0
    assert program.main([str(tmp_path / "none"), "--prompt", "a"]) == 2
    assert "is not a checkpoint and contains none" in capsys.readouterr().err
