"""A pass over a corpus that can be ended halfway, as its batches, commits and shards are small."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.texts import write_files
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus import encoding, store, tokenization
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.records import Document
from torchtitan_cp.data.corpus.store import append_documents
from torchtitan_cp.data.corpus.tokenization import Tokenization

BYTES = TokenizerConfig(kind="bytes")
DOCUMENTS = 300
COMMIT_TOKENS = 2000
BATCHES = ("BATCH_CHARACTERS", "CHAT_BATCH_CHARACTERS", "WORKER_BATCH_CHARACTERS")


def shrink() -> None:
    """Batches, commits and shards as small as the corpus."""
    for name in BATCHES:
        setattr(encoding, name, 100)
    tokenization.COMMIT_TOKENS = COMMIT_TOKENS
    store.append_documents = partial(append_documents, shard_bytes=3000)


def shrink_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in this process, for one test."""
    monkeypatch.setattr(store, "append_documents", append_documents)
    monkeypatch.setattr(tokenization, "COMMIT_TOKENS", tokenization.COMMIT_TOKENS)
    for name in BATCHES:
        monkeypatch.setattr(encoding, name, getattr(encoding, name))
    shrink()


def rows(folder: Path) -> Path:
    """Lines in four files, some malformed, some short, some of a group."""
    lines = [
        "{" if index % 17 == 0 else json.dumps({"text": f"{index} " * (1 + index % 50), "repo": f"r{index % 7}"})
        for index in range(DOCUMENTS)
    ]
    return write_files(folder, {f"{part}.jsonl": "\n".join(lines[part::4]) for part in range(4)})


def data_of(corpus: Path, cache: Path, source: str, document: str = "file") -> Data:
    """Of source "conversations" `corpus` is the file of tests.support.runs.write_conversations."""
    group_field = "repo" if source == "jsonl" else ""
    chats = {"messages_field": "messages", "chat_template": str(corpus.with_name("chat.jinja"))}
    return Data(
        source="jsonl" if source == "conversations" else source,
        **(chats if source == "conversations" else {}),
        path=str(corpus),
        cache_folder=str(cache),
        group_field=group_field,
        document=document,
        min_document=20,
        max_document=100,
        validation_fraction=0.2,
    )


def files(cache: Path) -> dict[str, bytes]:
    """Every file of the only finished folder, without the time that it took."""
    [folder] = [path.parent for path in cache.glob("*/manifest.json")]
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads(contents["manifest.json"])
    assert manifest.pop("seconds") > 0
    return {**contents, "manifest.json": json.dumps(manifest).encode()}


def stop_after(monkeypatch: pytest.MonkeyPatch, data: Data, last: int) -> Path:
    """Prepare, and stop after so many documents. Returns the half-made folder."""
    write, written = Tokenization._write, 0

    def write_or_stop(self: Tokenization, document: Document, ids: np.ndarray, mask: np.ndarray | None) -> None:
        nonlocal written
        write(self, document, ids, mask)
        written += 1
        if written == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tokenization, "_write", write_or_stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, BYTES)
    [left] = Path(data.cache_folder).glob("*.partial")
    return left
