"""Documents to token ids: read ahead, whole, in order, and the same ids and files by any number of processes."""

import json
import multiprocessing
import os
import signal
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chats import write_tokenizer
from tests.support.encoded import encode_all
from tests.support.half_made import BYTES, data_of, files, rows
from tests.support.row_files import write_parquet
from tests.support.runs import write_conversations
from tests.support.texts import text_corpus
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus import encoding
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.encoding import Encoder, read_ahead, tokenize
from torchtitan_cp.data.corpus.records import Document, SkippedRecords
from torchtitan_cp.data.corpus.tokenizer import ByteTokenizer
from torchtitan_cp.data.errors import DataError


def corpus_of(source: str, folder: Path) -> tuple[Path, TokenizerConfig]:
    """A corpus with rows that cannot be read, and a tokenizer; each kind of tokenizer occurs."""
    if source == "text":
        return text_corpus(folder / "corpus"), TokenizerConfig(vocab_size=300)
    if source == "jsonl":
        return rows(folder / "corpus"), BYTES
    if source == "parquet":
        texts = [f"row {index} " * (index % 30) for index in range(200)]  # some are empty
        for part in range(3):
            write_parquet(folder / "corpus" / f"{part}.parquet", {"text": texts[part::3]}, row_group_rows=20)
        return folder / "corpus", TokenizerConfig("huggingface", str(write_tokenizer(folder)))
    write_conversations(folder)
    chats = folder / "chats.jsonl"
    lines = chats.read_text().splitlines()
    lines[3::29] = ["{"] * len(lines[3::29])
    lines[7::31] = ['{"messages": [{"role": "nobody", "content": "x"}]}'] * len(lines[7::31])
    chats.write_text("\n".join(lines))
    return chats, BYTES


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "conversations"])
def test_several_processes_write_the_files_of_one(tmp_path: Path, small: None, source: str) -> None:
    corpus, tokenizer = corpus_of(source, tmp_path)
    for workers in (1, 2):
        prepare(data_of(corpus, tmp_path / str(workers), source), tokenizer, workers=workers)
    assert files(tmp_path / "2") == files(tmp_path / "1")
    skipped = json.loads(files(tmp_path / "2")["statistics.json"])["skipped_records"]
    assert skipped or source == "text"


def test_a_process_that_is_killed_ends_the_pass_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "WORKER_BATCH_CHARACTERS", 1)
    documents = [Document("text", str(number), None, 4) for number in range(50)]
    others = set(multiprocessing.active_children())  # of other tests
    made = tokenize(documents, Encoder(ByteTokenizer(), Data(), None), SkippedRecords(), BYTES, workers=2)
    assert next(made)[1].tolist() == list(b"text")
    for child in set(multiprocessing.active_children()) - others:
        os.kill(child.pid or 0, signal.SIGKILL)
    with pytest.raises(DataError, match="one of the 2 processes that tokenize was killed") as refused:
        list(made)
    assert "(--workers), then start again: what is tokenized is kept" in refused.value.fix


def test_the_next_item_is_read_while_one_is_worked_on() -> None:
    begun: list[int] = []
    second = threading.Event()

    def items() -> Iterator[int]:
        for item in range(4):
            begun.append(item)
            if item == 1:
                second.set()
            yield item

    results = read_ahead(items())
    assert next(results) == 0
    assert second.wait(60)
    assert begun == [0, 1]
    assert list(results) == [1, 2, 3]


def test_an_error_in_the_thread_that_reads_is_the_callers() -> None:
    def fail() -> Iterator[int]:
        yield 0
        raise DataError("item 1")

    results = read_ahead(fail())
    assert next(results) == 0
    with pytest.raises(DataError, match="item 1"):
        next(results)


def test_a_long_document_takes_memory_for_its_tokens_twice_and_not_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "FRAGMENT_CHARACTERS", 1 << 14)
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 1 << 16)
    text = "a long line of text\n" * 100_000
    tracemalloc.start()
    for _, ids, _ in encode_all([Document(text, "long", None, len(text))], ByteTokenizer()):
        kept, most = tracemalloc.get_traced_memory()
        assert len(ids) == len(text)
    tracemalloc.stop()
    assert kept < 2.5 * len(text), "of two bytes a token"
    assert most < 4.5 * len(text) + (1 << 20)
