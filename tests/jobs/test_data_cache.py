"""Processes that prepare the same corpus: one is killed, others wait for it or build in its place."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.corpus_cache import BYTES, assert_is_the_corpus, data_of, finished, partial
from tests.support.texts import REPOSITORY, text_corpus
from torchtitan_cp.config.data import Data
from torchtitan_cp.data.corpus.cache import prepare

pytestmark = pytest.mark.jobs


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return data_of(text_corpus(tmp_path / "corpus"), tmp_path / "cache")


SCRIPT = """
import logging, os, signal, sys, time
from pathlib import Path
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer
from torchtitan_cp.data.corpus import cache, tokenization
logging.basicConfig(level=logging.INFO, format="%(message)s")
run = tokenization.Tokenization.tokenize
def run_and_more(self):
    found = run(self)
    {before_the_end}
    return found
tokenization.Tokenization.tokenize = run_and_more
corpus = cache.prepare(Data(source="text", path=sys.argv[1], cache_folder=sys.argv[2], validation_fraction=0.2),
                       Tokenizer(kind="bytes"))
print(corpus.fingerprint)
"""


def start(data: Data, before_the_end: str) -> "subprocess.Popen[str]":
    """A process that prepares the corpus with the byte tokenizer, and does something when the tokens are written."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(before_the_end=before_the_end), data.path, data.cache_folder],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_build_leaves_nothing_that_looks_finished_and_the_next_one_cleans_up(data: Data) -> None:
    killed = start(data, "os.kill(os.getpid(), signal.SIGKILL)")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not finished(data)
    [left] = partial(data)
    assert (left / "train-00000.bin").stat().st_size > 0
    stale = left.with_name("0" * len(left.stem) + ".partial")
    stale.mkdir()
    assert_is_the_corpus(prepare(data, BYTES), data)
    assert not partial(data)
    assert len(finished(data)) == 1


def test_of_two_processes_one_builds_and_the_other_waits_for_it(data: Data, tmp_path: Path) -> None:
    go = tmp_path / "go"
    builder = start(data, f"while not Path({str(go)!r}).exists(): time.sleep(0.01)")
    deadline = time.monotonic() + 60
    while not partial(data) and time.monotonic() < deadline:
        time.sleep(0.01)
    waiting = start(data, "raise AssertionError('built twice')")
    assert waiting.stderr is not None
    first_line = waiting.stderr.readline()
    go.touch()
    logs = [process.communicate(timeout=60) for process in (builder, waiting)]
    assert first_line == f"waiting for another process that prepares a corpus in {data.cache_folder}\n"
    assert [process.returncode for process in (builder, waiting)] == [0, 0]
    assert logs[0][0] == logs[1][0] != ""
    assert "preparing corpus: 40 files" in logs[0][1]
    assert "preparing corpus" not in logs[1][1]
    assert "waiting" not in logs[1][1]


@pytest.mark.deep
def test_another_process_builds_when_the_builder_dies(data: Data) -> None:
    builder = start(data, "print('written', flush=True); time.sleep(600)")
    assert builder.stdout is not None
    assert builder.stdout.readline() == "written\n"
    waiting = start(data, "pass")
    assert waiting.stderr is not None
    assert waiting.stderr.readline().startswith("waiting for another process")
    builder.kill()
    builder.communicate(timeout=60)
    fingerprint, log = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert "preparing corpus: 40 files" in log
    assert fingerprint.strip() == prepare(data, BYTES).fingerprint
