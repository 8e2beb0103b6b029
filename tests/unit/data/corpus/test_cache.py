"""Preparing a corpus: once, whole, and again when something changed."""

import errno
import fcntl
import itertools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.corpus_cache import BYTES, assert_is_the_corpus, contents, data_of, finished, only, partial
from tests.support.disks import recorded_syncs
from tests.support.texts import read, text_corpus, warnings, write_files
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus import cache, documents, encoding, store
from torchtitan_cp.data.corpus.cache import CacheBuilder, open_cache, prepare
from torchtitan_cp.data.corpus.documents import key_hash
from torchtitan_cp.data.errors import DataError, PreparationStoppedError


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return data_of(text_corpus(tmp_path / "corpus"), tmp_path / "cache")


def refuse(data: Data, tokenizer: TokenizerConfig = BYTES) -> str:
    with pytest.raises(DataError) as caught:
        prepare(data, tokenizer)
    return str(caught.value)


@pytest.mark.parametrize("tokenizer", [BYTES, TokenizerConfig(vocab_size=300)], ids=["bytes", "trained"])
@pytest.mark.parametrize("document", ["file", "folder"])
def test_every_document_of_each_split_is_kept_with_its_end(
    data: Data, tmp_path: Path, tokenizer: TokenizerConfig, document: str
) -> None:
    data = data_of(tmp_path / "corpus", tmp_path / "cache", document=document)
    assert_is_the_corpus(prepare(data, tokenizer), data)
    assert len(finished(data)) == 1
    assert not partial(data)


def test_a_prepared_corpus_is_found_and_not_made_again(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TokenizerConfig(vocab_size=300)
    first = prepare(data, tokenizer)
    monkeypatch.setattr(cache, "Tokenization", None)
    again = prepare(data, tokenizer)
    assert again.fingerprint == first.fingerprint
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert contents(only(again).train) == contents(only(first).train)
    np.testing.assert_array_equal(again.unigram_counts, first.unigram_counts)


def test_a_long_document_is_cut_for_the_tokenizer_and_whole_on_disk(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(data, TokenizerConfig(vocab_size=300))
    monkeypatch.setattr(encoding, "FRAGMENT_CHARACTERS", 50)
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 120)
    finished(data)[0].rename(Path(data.cache_folder) / "elsewhere")
    assert prepare(data, TokenizerConfig(vocab_size=300)).fingerprint == whole.fingerprint


def test_the_fingerprint_is_of_the_tokens_and_not_of_where_they_come_from(data: Data, tmp_path: Path) -> None:
    first = prepare(data, BYTES)
    other = data_of(text_corpus(tmp_path / "other"), tmp_path / "other_cache")
    assert prepare(other, BYTES).fingerprint == first.fingerprint
    write_files(tmp_path / "other", {"part0/000.txt": "another text"})
    assert prepare(other, BYTES).fingerprint != first.fingerprint


def test_a_changed_file_is_noticed(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    prepare(data, BYTES)
    assert not warnings(caplog)
    write_files(Path(data.path), {"part0/000.txt": "another text"})
    assert_is_the_corpus(prepare(data, BYTES), data)
    assert len(warnings(caplog)) == 1
    assert warnings(caplog)[0].startswith(f"the corpus changed since {data.cache_folder}/")


def test_a_changed_tokenizer_is_noticed(data: Data, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = [TokenizerConfig(vocab_size=size) for size in (300, 310)]
    given = TokenizerConfig(path=str(tmp_path / "given.model"))
    elsewhere = replace(data, cache_folder=str(tmp_path / "elsewhere"))
    for tokenizer in trained:
        prepare(elsewhere, tokenizer)
    models = list(Path(elsewhere.cache_folder).glob("tokenizer-*.model"))
    assert len(models) == 2
    assert not warnings(caplog)
    for model in models:
        Path(given.path).write_bytes(model.read_bytes())
        assert_is_the_corpus(prepare(data, given), data)
    assert len(warnings(caplog)) == 1
    assert warnings(caplog)[0].startswith(f"the tokenizer changed since {data.cache_folder}/")


def remove(path: Path) -> str:
    path.unlink()
    return f"({path.name} is missing)"


def cut(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size - 2)
    return f"({path.name} has {size - 2} bytes instead of {size})"


def spoil_manifest(path: Path) -> str:
    path.with_name("manifest.json").write_text("{")
    return "(manifest.json is missing or unreadable)"


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (spoil_manifest, "manifest.json"),
        *itertools.product((remove, cut), ("train-00000.bin", "train.groups.bin", "train.offsets.bin")),
    ],
)
def test_a_damaged_cache_is_named_and_made_again(
    data: Data, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], str], name: str
) -> None:
    first = prepare(data, BYTES)
    tokens = contents(only(first).train)
    [folder] = finished(data)
    what = damage(folder / name)
    again = prepare(data, BYTES)
    assert again.fingerprint == first.fingerprint
    assert contents(only(again).train) == tokens
    assert warnings(caplog) == [f"the prepared corpus in {folder} is damaged {what}; it is made again"]


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, data: Data) -> None:
    blocked = data_of(Path(data.path), write_files(tmp_path, {"file": "x"}) / "file" / "cache")
    message = refuse(blocked)
    assert f"data.cache_folder = '{blocked.cache_folder}' cannot be written: Not a directory" in message
    assert "fix: give data.cache_folder a folder that can be written and locked" in message


def test_a_full_disk_is_named_and_leaves_nothing(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(*arguments: object, masks: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "append_documents", append)
    assert "cannot be written: No space left on device" in refuse(data)
    assert not partial(data)
    assert not finished(data)


def test_a_finished_folder_that_cannot_be_mapped_is_named(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    def memmap(*_: object, **__: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    prepare(data, BYTES)
    monkeypatch.setattr(np, "memmap", memmap)
    with pytest.raises(OSError, match="No such device") as raised:
        prepare(data, BYTES)
    assert raised.value.filename == str(finished(data)[0])


@pytest.mark.parametrize("tokenizer", [BYTES, TokenizerConfig(vocab_size=300)], ids=["bytes", "trained"])
def test_a_power_cut_takes_nothing_from_a_finished_folder(data: Data, tokenizer: TokenizerConfig) -> None:
    with recorded_syncs() as is_flushed:
        prepare(data, tokenizer)
    [folder] = finished(data)
    models = Path(data.cache_folder).glob("*.model")
    assert [path.name for path in (*folder.iterdir(), *models) if not is_flushed(path)] == []


def test_a_file_system_without_locks_is_named(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert "cannot be written: No locks available" in refuse(data)


@pytest.mark.parametrize("document", ["file", "folder"])
def test_where_the_hash_holds_out_nothing_the_document_with_the_lowest_hash_is_held_out(
    tmp_path: Path, document: str
) -> None:
    corpus = text_corpus(tmp_path / "corpus", files=120)
    fewest = data_of(corpus, tmp_path / "cache", validation_fraction=1e-9, document=document)
    prepared = prepare(fewest, BYTES)
    whole = read(replace(fewest, validation_fraction=0.0))
    [held_out] = [prepared.tokenizer.decode(ids) for ids in contents(only(prepared).validation)]
    lowest = min(whole, key=lambda document: key_hash(document.key)).key
    assert held_out == (corpus / lowest).read_text()
    rest = "".join(prepared.tokenizer.decode(ids) for ids in contents(only(prepared).train))
    assert len(rest) + len(held_out) == sum(len(str(document.content)) for document in whole)
    assert prepare(fewest, BYTES).fingerprint == prepared.fingerprint
    assert only(prepared).statistics.train.documents == only(prepared).train.documents


@pytest.mark.parametrize("last", range(8))
def test_one_long_document_among_short_ones_is_never_held_out(tmp_path: Path, last: int) -> None:
    """Whatever the hash of its name."""
    texts = {f"long-{last}.txt": "a long text " * 50, "a.txt": "short", "b.txt": "as short as it"}
    data = data_of(write_files(tmp_path / "corpus", texts), tmp_path / "cache", validation_fraction=1e-9)
    assert only(prepare(data, BYTES)).validation.tokens < 20


def test_of_files_shorter_than_min_document_the_folder_with_the_lowest_hash_is_held_out(tmp_path: Path) -> None:
    names = [f"{folder}/{number}.txt" for folder in "ab" for number in range(9)]
    corpus = write_files(tmp_path / "corpus", dict.fromkeys(names, "a few words"))
    data = data_of(corpus, tmp_path / "cache", validation_fraction=1e-9, document="folder")
    [held_out] = contents(only(prepare(replace(data, min_document=64), BYTES)).validation)
    assert len(held_out) >= 9 * len("a few words")


def test_a_corpus_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    one = data_of(write_files(tmp_path / "corpus", {"a.txt": "the only one"}), tmp_path / "cache", 1e-9)
    message = refuse(one)
    assert "data.validation_fraction = 1e-09 holds out 0 of 1 documents, and each split needs one" in message
    assert "fix: give more documents (of text: files), or set it to 0 to" in message
    assert not finished(one)


def test_a_training_split_that_would_be_empty_is_refused(data: Data) -> None:
    message = refuse(data_of(Path(data.path), Path(data.cache_folder), validation_fraction=1.0))
    assert "data.validation_fraction = 1.0 holds out 40 of 40 documents" in message
    assert "lower the fraction" in message


@pytest.mark.parametrize("tokenizer", [BYTES, TokenizerConfig()], ids=["bytes", "trained"])
def test_a_corpus_without_a_document_is_refused(tmp_path: Path, tokenizer: TokenizerConfig) -> None:
    empty = data_of(write_files(tmp_path / "corpus", {"a.txt": ""}), tmp_path / "cache")
    assert "holds no document; files: 1" in refuse(empty, tokenizer)


def test_without_a_fraction_nothing_is_held_out(data: Data) -> None:
    prepared = prepare(data_of(Path(data.path), Path(data.cache_folder), validation_fraction=0.0), BYTES)
    assert (only(prepared).validation.documents, only(prepared).validation.tokens) == (0, 0)
    assert only(prepared).train.documents == 40


def test_what_was_skipped_is_logged_once_and_summed_up_at_every_start(
    data: Data, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_files(Path(data.path), {"bad.txt": b"\xff", "worse.txt": b"\xff"})
    tokenizer = TokenizerConfig(vocab_size=300)
    prepare(data, tokenizer)
    assert warnings(caplog) == [
        f"{data.path}/bad.txt:1: not UTF-8; skipped",
        f"{data.path}/worse.txt:1: not UTF-8; skipped",
        "skipped in the corpus: 2 x not UTF-8",
    ]
    caplog.clear()
    prepare(data, tokenizer)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("corpus: ")
    assert line.endswith("; left out or cut: 2 x not UTF-8")


def test_the_manifest_lists_what_the_folder_holds(data: Data) -> None:
    prepared = only(prepare(data, BYTES))
    [folder] = finished(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["vocab_size"] == prepared.train.vocab_size == prepared.validation.vocab_size
    assert manifest["content_fingerprint"] == prepared.fingerprint
    assert manifest["settings"]["data"]["path"] == data.path
    assert manifest["file_bytes"] == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"
    }


def test_progress_goes_to_the_log_where_there_is_no_terminal(
    data: Data, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(documents, "LOG_INTERVAL_SECONDS", 0.0)
    prepare(data, BYTES)
    assert "tokenizing: 0 of 0 MB" in [record.getMessage() for record in caplog.records]


def test_a_cache_of_an_earlier_version_still_opens(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(data, BYTES)
    [folder] = finished(data)
    statistics = (folder / "statistics.json").read_text()
    assert '"skipped_records"' in statistics
    (folder / "statistics.json").write_text(statistics.replace('"skipped_records"', '"rejects"'))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["file_bytes"]["statistics.json"] = (folder / "statistics.json").stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(cache, "Tokenization", None)
    again = prepare(data, BYTES)
    assert again.fingerprint == first.fingerprint
    assert only(again).statistics == only(first).statistics


def test_who_opens_the_cache_lists_no_file_of_the_corpus(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    locations = CacheBuilder(data, TokenizerConfig(vocab_size=300), lambda: False).build()
    monkeypatch.setattr(cache, "Corpus", None)
    opened = open_cache(json.loads(json.dumps(locations)), data, TokenizerConfig(vocab_size=300))
    monkeypatch.undo()
    assert opened.fingerprint == prepare(data, TokenizerConfig(vocab_size=300)).fingerprint


@pytest.mark.parametrize(
    ("tokenizer", "last"),
    [(BYTES, 20), (BYTES, 40), (TokenizerConfig(vocab_size=300), 20)],
    ids=["bytes", "at the end of bytes", "trained"],
)
def test_a_stop_is_heard_and_the_next_start_gives_the_same(
    data: Data, tmp_path: Path, tokenizer: TokenizerConfig, last: int
) -> None:
    asked = 0

    def stop_requested() -> bool:
        nonlocal asked
        asked += 1
        return asked > last

    message = r"stopped while (tokenizing: [0-9,]+ tokens are in|reading text to train)"
    with pytest.raises(PreparationStoppedError, match=message):
        CacheBuilder(data, tokenizer, stop_requested).build()
    assert asked == last + 1, "it stops at once"
    assert not finished(data)
    elsewhere = replace(data, cache_folder=str(tmp_path / "elsewhere"))
    assert prepare(data, tokenizer).fingerprint == prepare(elsewhere, tokenizer).fingerprint


def test_a_stop_is_heard_while_another_process_holds_the_lock(data: Data) -> None:
    Path(data.cache_folder).mkdir()
    with open(Path(data.cache_folder) / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PreparationStoppedError, match="stopped while waiting for another process"):
            CacheBuilder(data, BYTES, lambda: True).build()
