"""A tokenizing pass that is killed resumes at its last commit and writes the same files, bit for bit."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.deep import deep_rows
from tests.support.half_made import BYTES, COMMIT_TOKENS, data_of, files, rows, shrink_until_the_end
from tests.support.runs import write_conversations
from tests.support.texts import REPOSITORY, text_corpus
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.tokenizer import ByteTokenizer

pytestmark = pytest.mark.jobs


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_until_the_end(monkeypatch)


KILLED = """
import multiprocessing, os, signal, sys
from pathlib import Path
from tests.support import half_made
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.tokenization import Tokenization
corpus, cache, source, document, last, workers = sys.argv[1:]
half_made.shrink()
write, written = Tokenization._write, 0
def write_or_die(*arguments):
    global written
    write(*arguments)
    written += 1
    if written == int(last):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
Tokenization._write = write_or_die
prepare(half_made.data_of(Path(corpus), Path(cache), source, document), half_made.BYTES, workers=int(workers))
"""


def prepare_and_die(corpus: Path, cache: Path, source: str, document: str, last: int, workers: int = 1) -> bool:
    """Kill a process after so many documents; its workers end with it. Returns whether it had committed any."""
    arguments = [str(corpus), str(cache), source, document, str(last), str(workers)]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], cwd=REPOSITORY, timeout=60, check=False, stdout=subprocess.PIPE
    )
    assert killed.returncode == -signal.SIGKILL
    children = list(map(int, killed.stdout.split()))
    assert len(children) == (workers if workers > 1 else 0)
    deadline = time.monotonic() + 60
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, children))
    [left] = cache.glob("*.partial")
    return (left / "journal.json").exists()


def is_running(process: int) -> bool:
    """Whether a process has not ended, reaped or not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@deep_rows(
    ("source", "document", "last"),
    [("jsonl", "file", 2), ("jsonl", "file", 150), ("text", "file", 61), ("text", "folder", 4)],
    default=[("jsonl", "file", 150)],
)
def test_a_killed_tokenizing_pass_resumes_at_its_last_commit(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, source: str, document: str, last: int
) -> None:
    corpus = rows(tmp_path / "corpus") if source == "jsonl" else text_corpus(tmp_path / "corpus", files=80)
    straight = data_of(corpus, tmp_path / "straight", source, document)
    encoded = record_encoded(monkeypatch)
    fingerprint = prepare(straight, BYTES).fingerprint
    whole = list(encoded)
    encoded.clear()

    committed = last > 2
    assert prepare_and_die(corpus, tmp_path / "killed", source, document, last) == committed

    data = data_of(corpus, tmp_path / "killed", source, document)
    assert prepare(data, BYTES).fingerprint == fingerprint
    assert files(tmp_path / "killed") == files(tmp_path / "straight")
    assert encoded == whole[len(whole) - len(encoded) :], "what is done again is the end of the pass"
    again = sum(map(len, encoded)) + len(encoded) - (sum(map(len, whole[last:])) + len(whole[last:]))
    assert again < COMMIT_TOKENS + 1000, "no more than since the last commit"
    assert (len(encoded) < len(whole)) == committed


@deep_rows("last", [2, 150, 260], default=[150])
def test_a_kill_of_several_processes_loses_nothing_that_was_committed(tmp_path: Path, small: None, last: int) -> None:
    corpus = rows(tmp_path / "corpus")
    prepare(data_of(corpus, tmp_path / "straight", "jsonl"), BYTES)
    assert prepare_and_die(corpus, tmp_path / "killed", "jsonl", "file", last, workers=2) == (last > 2)
    assert not list((tmp_path / "killed").glob("*/manifest.json"))
    prepare(data_of(corpus, tmp_path / "killed", "jsonl"), BYTES, workers=2)
    assert files(tmp_path / "killed") == files(tmp_path / "straight")


@pytest.mark.deep
@pytest.mark.parametrize("last", [100, 230])
def test_masks_of_conversations_are_the_same_bytes_after_a_kill(tmp_path: Path, small: None, last: int) -> None:
    write_conversations(tmp_path)
    corpus, straight, killed = (tmp_path / name for name in ("chats.jsonl", "straight", "killed"))
    prepare(data_of(corpus, straight, "conversations"), BYTES)
    assert prepare_and_die(corpus, killed, "conversations", "file", last)
    prepare(data_of(corpus, killed, "conversations"), BYTES)
    assert files(killed) == files(straight)
    assert {"train.mask.bin", "validation.mask.bin"} <= files(killed).keys()


def record_encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is tokenized from now on."""
    encoded: list[str] = []
    encode = ByteTokenizer.encode_batch

    def encode_batch(self: ByteTokenizer, texts: list[str]) -> list[np.ndarray]:
        encoded.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_batch)
    return encoded
