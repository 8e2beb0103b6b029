"""A pass over a corpus that is killed goes on from its last commit, and gives the same files bit for bit."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.data.texts import REPOSITORY, text_corpus, warnings, write_files
from torchtitan_cp.config.sections import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data import prepare, tokenizing
from torchtitan_cp.data.store import TokenWriter
from torchtitan_cp.data.tokenizer import ByteTokenizer

BYTES = TokenizerConfig(kind="bytes")
DOCUMENTS = 300
COMMIT_TOKENS = 2000


def shrink() -> None:
    """Batches, commits and shards as small as the corpus."""
    tokenizing.BATCH_CHARACTERS = 100
    tokenizing.COMMIT_TOKENS = COMMIT_TOKENS
    tokenizing.TokenWriter = partial(TokenWriter, shard_bytes=3000)  # type: ignore[assignment, misc]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCH_CHARACTERS", "COMMIT_TOKENS", "TokenWriter"):
        monkeypatch.setattr(tokenizing, name, getattr(tokenizing, name))
    shrink()


def rows(folder: Path) -> Path:
    """Lines in four files, some malformed, some short, some of a group."""
    lines = [
        "{" if index % 17 == 0 else json.dumps({"text": f"{index} " * (1 + index % 50), "repo": f"r{index % 7}"})
        for index in range(DOCUMENTS)
    ]
    return write_files(folder, {f"{part}.jsonl": "\n".join(lines[part::4]) for part in range(4)})


def data_of(corpus: Path, cache: Path, source: str, document: str = "file") -> Data:
    group_field = "repo" if source == "jsonl" else ""
    return Data(
        source=source,
        path=str(corpus),
        cache_folder=str(cache),
        group_field=group_field,
        document=document,
        min_document=20,
        max_document=100,
        validation_fraction=0.2,
    )


def files(cache: Path) -> dict[str, bytes]:
    """Every file of the only finished folder."""
    [folder] = [path.parent for path in cache.glob("*/manifest.json")]
    return {path.name: path.read_bytes() for path in folder.iterdir()}


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.data import test_restart
from torchtitan_cp.data import prepare, tokenizing
corpus, cache, source, document, last = sys.argv[1:]
test_restart.shrink()
write, written = tokenizing._SplitsWriter.write, 0
def write_or_die(*arguments):
    global written
    write(*arguments)
    written += 1
    if written == int(last):
        os.kill(os.getpid(), signal.SIGKILL)
tokenizing._SplitsWriter.write = write_or_die
prepare(test_restart.data_of(Path(corpus), Path(cache), source, document), test_restart.BYTES)
"""


@pytest.mark.parametrize(
    ("source", "document", "last"),
    [("jsonl", "file", 2), ("jsonl", "file", 150), ("text", "file", 61), ("text", "folder", 4)],
)
def test_a_killed_pass_goes_on_where_it_committed(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, source: str, document: str, last: int
) -> None:
    corpus = rows(tmp_path / "corpus") if source == "jsonl" else text_corpus(tmp_path / "corpus", files=80)
    straight = data_of(corpus, tmp_path / "straight", source, document)
    encoded = record_encoded(monkeypatch)
    fingerprint = prepare(straight, BYTES).fingerprint
    whole = list(encoded)
    encoded.clear()

    arguments = [str(corpus), str(tmp_path / "killed"), source, document, str(last)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=REPOSITORY, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    [left] = (tmp_path / "killed").glob("*.partial")
    committed = last > 2
    assert (left / "journal.json").exists() == committed

    data = data_of(corpus, tmp_path / "killed", source, document)
    assert prepare(data, BYTES).fingerprint == fingerprint
    assert files(tmp_path / "killed") == files(tmp_path / "straight")
    assert encoded == whole[len(whole) - len(encoded) :], "what is done again is the end of the pass"
    again = sum(map(len, encoded)) + len(encoded) - (sum(map(len, whole[last:])) + len(whole[last:]))
    assert again < COMMIT_TOKENS + 1000, "no more than since the last commit"
    assert (len(encoded) < len(whole)) == committed


def record_encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is tokenized from now on."""
    encoded: list[str] = []
    encode = ByteTokenizer.encode_batch

    def encode_batch(self: ByteTokenizer, texts: list[str]) -> list[np.ndarray]:
        encoded.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_batch)
    return encoded


def stop_after(monkeypatch: pytest.MonkeyPatch, data: Data, last: int) -> Path:
    """Prepare, and stop after so many documents. Returns the half-made folder."""
    write, written = tokenizing._SplitsWriter.write, 0

    def write_or_stop(self: tokenizing._SplitsWriter, document: tokenizing.Document, ids: np.ndarray) -> None:
        nonlocal written
        write(self, document, ids)
        written += 1
        if written == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenizing._SplitsWriter, "write", write_or_stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, BYTES)
    [left] = Path(data.cache_folder).glob("*.partial")
    return left


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
    return f"{path.name} is shorter than"


def overwrite(path: Path) -> str:
    path.write_bytes(bytes(path.stat().st_size))
    return "the last file of train was changed"


@pytest.mark.parametrize(
    ("name", "damage"),
    [("train-00000.bin", lose), ("groups.jsonl", lose), ("train.groups.bin", lose), ("last", overwrite)],
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
    what = damage(left / name if name != "last" else sorted(left.glob("train-*.bin"))[-1])
    prepare(data, BYTES)
    [line] = [line for line in warnings(caplog) if "damaged" in line]
    assert line.startswith(f"the half-made tokens in {left} are damaged ({what}")
    assert line.endswith("; they are made again")
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
