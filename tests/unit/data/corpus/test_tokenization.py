"""A pass over a corpus that is stopped continues from its last commit, and damaged partial tokens are named."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.half_made import BYTES, data_of, files, rows, stop_after
from tests.support.texts import text_corpus, warnings
from torchtitan_cp.config.sections import Data
from torchtitan_cp.data.corpus.cache import prepare


def test_a_pass_that_is_stopped_anywhere_gives_the_same_files(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = rows(tmp_path / "corpus")
    prepare(data_of(corpus, tmp_path / "straight", "jsonl"), BYTES)
    for last in range(60, 280, 23):
        data = data_of(corpus, tmp_path / str(last), "jsonl")
        stop_after(monkeypatch, data, last)
        stop_after(monkeypatch, data, 1)
        prepare(data, BYTES)
        assert files(tmp_path / str(last)) == files(tmp_path / "straight")


def lose(path: Path) -> str:
    path.unlink()
    return f"{path.name} is missing"


def shorten(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size - 1)
    return f"{path.name} has {size - 1} bytes instead of "


@pytest.mark.parametrize(
    ("name", "damage"),
    [("train-00000.bin", lose), ("groups.jsonl", lose), ("train.groups.bin", lose), ("train-00000.bin", shorten)],
)
def test_half_made_tokens_that_are_damaged_are_named_and_made_again(
    tmp_path: Path,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], str],
) -> None:
    corpus = rows(tmp_path / "corpus")
    prepare(data_of(corpus, tmp_path / "straight", "jsonl"), BYTES)
    data = data_of(corpus, tmp_path / "cache", "jsonl")
    left = stop_after(monkeypatch, data, 200)
    caplog.clear()
    what = damage(left / name)
    prepare(data, BYTES)
    [line] = [line for line in warnings(caplog) if "damaged" in line]
    assert line.startswith(f"the partial tokens in {left} are damaged ({what}")
    assert line.endswith("; they are made again")
    assert files(tmp_path / "cache") == files(tmp_path / "straight")


def test_half_made_tokens_of_another_version_are_made_again(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = rows(tmp_path / "corpus")
    prepare(data_of(corpus, tmp_path / "straight", "jsonl"), BYTES)
    data = data_of(corpus, tmp_path / "cache", "jsonl")
    journal = stop_after(monkeypatch, data, 200) / "journal.json"
    journal.write_text(journal.read_text().replace('"state"', '"progress"'))
    prepare(data, BYTES)
    assert files(tmp_path / "cache") == files(tmp_path / "straight")


def test_half_made_tokens_of_a_corpus_that_changed_are_cleared_away_and_others_kept(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(rows(tmp_path / "corpus"), tmp_path / "cache", "jsonl")
    other = data_of(text_corpus(tmp_path / "other", files=80), tmp_path / "cache", "text")
    old = stop_after(monkeypatch, data, 200)
    kept = stop_after_beside(monkeypatch, other, 70, old)
    os.utime(tmp_path / "corpus" / "0.jsonl", ns=(0, 0))
    prepare(data, BYTES)
    assert not old.exists()
    assert kept.exists()


def stop_after_beside(monkeypatch: pytest.MonkeyPatch, data: Data, last: int, beside: Path) -> Path:
    hidden = beside.rename(beside.parent.parent / "hidden")
    left = stop_after(monkeypatch, data, last)
    hidden.rename(beside)
    return left
