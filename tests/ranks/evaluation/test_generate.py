"""Text from a run that was just trained."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.rank_pool import RankPool
from tests.support.runs import train, write_run
from torchtitan_cp.cli import generate as program
from torchtitan_cp.cli.open_run import open_run
from torchtitan_cp.config import ConfigError


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
    assert_opens_in_python(tmp_path / "run", capsys)


def assert_opens_in_python(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same run in Python gives the command's text, and logits that its tokens follow from."""
    arguments = [str(folder), "--prompt", "def ", "--max-tokens", "40", "--temperature", "0"]
    assert program.main(arguments) == 0
    run = open_run(folder)
    assert "def " + run.generate("def ", max_tokens=40) + "\n" == capsys.readouterr().out
    assert (run.saved.progress.step, run.saved.stage.seq_len) == (2, 128)
    ids = run.encode("def ")
    logits = run.logits(ids)
    assert logits.shape == (len(ids), run.tokenizer.vocab_size)
    assert run.tokenizer.decode([int(logits[-1].argmax())]) == run.generate(ids, max_tokens=1)
    assert torch.allclose(run.logits("def ")[:2], run.logits(ids[:2]), atol=1e-5), "no token sees a later one"
    with pytest.raises(ConfigError, match="step-2 has no chat template"):
        run.generate([{"role": "user", "content": "def "}])
    with pytest.raises(ConfigError, match="is not a checkpoint and contains none"):
        open_run(folder / "none")
