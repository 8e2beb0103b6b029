"""Several sources: each a store of its own, one tokenizer, groups, rules of length, and what came of it in numbers."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.texts import text_corpus, warnings, write_files
from torchtitan_cp.config.data import Data, DataSource
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.cache import PreparedSource, prepare
from torchtitan_cp.data.corpus.statistics import LengthStatistics, SourceStatistics, statistics_table
from torchtitan_cp.data.corpus.store import TokenStore
from torchtitan_cp.data.corpus.tokenizer import ByteTokenizer
from torchtitan_cp.data.errors import DataError

BYTES = TokenizerConfig(kind="bytes")


def text_source(name: str, path: Path, **keys: Any) -> DataSource:
    return DataSource(name=name, source="text", path=str(path), **{"validation_fraction": 0.2, **keys})


def data_of(cache: Path, *sources: DataSource) -> Data:
    return Data(sources=sources, cache_folder=str(cache))


def only(data: Data, tokenizer: TokenizerConfig = BYTES) -> PreparedSource:
    [source] = prepare(data, tokenizer).sources.values()
    return source


def rows(store: TokenStore) -> list[list[int]]:
    return [store.read(index, 0, length).tolist() for index, length in enumerate(store.document_lengths)]


def jsonl_source(folder: Path, texts: list[str], **keys: Any) -> DataSource:
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    write_files(folder, {"a.jsonl": lines})
    return DataSource(name="lines", source="jsonl", path=str(folder), **{"validation_fraction": 0.0, **keys})


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that are tokenized from here on."""
    seen: list[str] = []
    encode = ByteTokenizer.encode_batch

    def encode_batch(self: ByteTokenizer, texts: list[str]) -> list[np.ndarray]:
        seen.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_batch)
    return seen


def test_a_source_that_is_added_is_the_only_one_that_is_tokenized(tmp_path: Path, built: list[str]) -> None:
    books = text_source("books", text_corpus(tmp_path / "books"))
    code = text_source("code", text_corpus(tmp_path / "code", files=50))
    notes = text_source(
        "notes", write_files(tmp_path / "notes", {"a": "first", "b": "second"}), validation_fraction=0.0
    )
    first = prepare(data_of(tmp_path / "cache", books, code), BYTES)
    built.clear()
    more = prepare(data_of(tmp_path / "cache", notes, code, books), BYTES)
    assert built == ["first", "second"]
    assert list(more.sources) == ["notes", "code", "books"]
    for name, source in first.sources.items():
        assert more.sources[name].fingerprint == source.fingerprint
    assert more.fingerprint != first.fingerprint
    counts = sum(np.bincount(np.concatenate(rows(source.train)), minlength=257) for source in more.sources.values())
    np.testing.assert_array_equal(more.unigram_counts, counts)
    reordered = prepare(data_of(tmp_path / "cache", books, notes, code), BYTES)
    assert reordered.fingerprint == more.fingerprint


def test_one_source_is_the_same_as_keys_of_data_and_as_a_table(tmp_path: Path, built: list[str]) -> None:
    source = text_source("books", text_corpus(tmp_path / "books"))
    table = prepare(data_of(tmp_path / "cache", source), BYTES)
    built.clear()
    short = Data(source="text", path=source.path, validation_fraction=0.2, cache_folder=str(tmp_path / "cache"))
    assert list(prepare(short, BYTES).sources) == ["corpus"]
    assert only(short).fingerprint == table.sources["books"].fingerprint
    assert not built


def test_a_tokenizer_is_trained_on_all_sources_once(tmp_path: Path) -> None:
    sources = [
        text_source(name, write_files(tmp_path / name, {f"{i}": f"{letters * 9} {i}\n" * 3 for i in range(60)}))
        for name, letters in (("latin", "abcdefgh"), ("greek", "αβγδεζηθ"))
    ]
    trained = TokenizerConfig(vocab_size=330)
    prepared = prepare(data_of(tmp_path / "cache", *sources), trained)
    assert len(list((tmp_path / "cache").glob("tokenizer-*.model"))) == 1
    for text in ("abcdefgh", "αβγδεζηθ"):
        [ids] = prepared.tokenizer.encode_batch([text])
        assert len(ids) <= len(text), "no piece is a byte"
    again = prepare(data_of(tmp_path / "cache", *sources), trained)
    assert again.tokenizer.fingerprint == prepared.tokenizer.fingerprint
    assert again.fingerprint == prepared.fingerprint


def test_a_damaged_trained_tokenizer_is_named(tmp_path: Path) -> None:
    data = data_of(tmp_path / "cache", text_source("books", text_corpus(tmp_path / "books")))
    prepare(data, TokenizerConfig(vocab_size=300))
    [model] = (tmp_path / "cache").glob("tokenizer-*.model")
    model.write_bytes(b"")
    with pytest.raises(DataError) as caught:
        prepare(data, TokenizerConfig(vocab_size=300))
    assert str(caught.value) == f"the trained tokenizer {model} is damaged\n  fix: delete it: it is trained again"


def test_messages_name_the_source(tmp_path: Path) -> None:
    data = data_of(tmp_path / "cache", text_source("books", tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"finds no file at data.sources\['books'\].path = '.*nowhere'"):
        prepare(data, BYTES)
    full = text_source("books", text_corpus(tmp_path / "books"), validation_fraction=1.0)
    with pytest.raises(DataError, match=r"data.sources\['books'\].validation_fraction = 1.0 holds out 40 of 40"):
        prepare(data_of(tmp_path / "cache", full), BYTES)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    shortest=st.integers(0, 20),
    longest=st.integers(20, 40) | st.just(0),
)
def test_documents_are_split_evenly_or_counted_and_never_lost(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shortest: int, longest: int
) -> None:
    folder = tmp_path_factory.mktemp("lengths")
    texts = [chr(97 + index) * length for index, length in enumerate(lengths)]
    source = jsonl_source(folder / "corpus", texts, min_document=shortest, max_document=longest)
    kept = [text for text in texts if len(text) + 1 >= shortest]
    if not kept:
        with pytest.raises(DataError, match=r"documents are shorter than data.sources\['lines'\].min_document"):
            only(data_of(folder / "cache", source))
        return
    prepared = only(data_of(folder / "cache", source))
    parts = rows(prepared.train)
    assert all(part[-1] == 256 and part.count(256) == 1 for part in parts)
    assert all(len(part) <= longest for part in parts) or not longest
    text = "".join(bytes(part[:-1]).decode() for part in parts)
    assert text == "".join(kept)
    for text in kept:
        sizes = [len(part) for part in parts if part[0] == ord(text[0])]
        assert max(sizes) - min(sizes) <= 1
        assert (len(sizes) == 1) == (not longest or len(text) + 1 <= longest)
    statistics = prepared.statistics
    assert statistics.left_out_documents == len(texts) - len(kept)
    assert statistics.left_out_tokens == sum(len(text) + 1 for text in texts if text not in kept)
    assert statistics.split_documents == sum(0 < longest < len(text) + 1 for text in kept)


def test_what_is_left_out_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source = jsonl_source(tmp_path / "corpus", ["a", "bb", "c" * 30], min_document=4)
    only(data_of(tmp_path / "cache", source))
    line = caplog.records[-1].getMessage()
    assert line.startswith("lines: 1 document with 31 tokens to train on, none held out, in ")
    assert line.endswith("; left out or cut: 2 x shorter than min_document (5 tokens)")


def groups_of(prepared: PreparedSource) -> dict[int, str]:
    """First letters of the documents of each group of the training split."""
    letters: dict[int, str] = {}
    for row, group in zip(rows(prepared.train), prepared.train.groups, strict=True):
        letters[int(group)] = letters.get(int(group), "") + chr(row[0])
    return letters


def test_documents_of_a_folder_are_a_group(tmp_path: Path) -> None:
    files = {"1/x/a": "a", "1/x/b": "b", "1/y/c": "c", "2/d": "d", "e": "e", "1/f": "f"}
    folder = write_files(tmp_path / "corpus", files)
    data = data_of(tmp_path / "cache", text_source("code", folder, validation_fraction=0.0))
    assert sorted(groups_of(only(data)).values()) == ["ab", "c", "d", "e", "f"]


def test_groups_are_numbered_by_field_over_both_splits_and_lines_without_one_are_alone(tmp_path: Path) -> None:
    lines = [{"text": "abcdefgh"[i % 8] * 3, **({"repo": f"r{i % 8}"} if i % 8 < 6 else {})} for i in range(80)]
    write_files(tmp_path / "corpus", {"a.jsonl": "\n".join(map(json.dumps, lines))})
    source = DataSource("jsonl", str(tmp_path / "corpus"), group_field="repo", validation_fraction=0.3, name="code")
    prepared = only(data_of(tmp_path / "cache", source))
    splits = {
        split: (getattr(prepared, split), [chr(row[0]) for row in rows(getattr(prepared, split))])
        for split in ("train", "validation")
    }
    numbers: dict[str, set[int]] = {}
    for store, letters in splits.values():
        assert store.groups.dtype == np.int64
        for letter, group in zip(letters, store.groups.tolist(), strict=True):
            numbers.setdefault(letter, set()).add(group)
    assert all(len(numbers[letter]) == 1 for letter in "abcdef")
    assert [len(numbers[letter]) for letter in "gh"] == [10, 10]
    every = [group for groups in numbers.values() for group in groups]
    assert sorted(every) == list(range(26))
    [folder] = [path.parent for path in (tmp_path / "cache").glob("*/manifest.json")]
    names = dict(map(json.loads, (folder / "groups.jsonl").read_text().splitlines()))
    assert {names[group] for letter in "abcdef" for group in numbers[letter]} == {f"r{index}" for index in range(6)}
    assert len(names) == 6


def test_parts_of_a_split_document_are_a_group(tmp_path: Path) -> None:
    source = jsonl_source(tmp_path / "corpus", ["a" * 30, "b" * 5, "c" * 30], max_document=12)
    assert sorted(groups_of(only(data_of(tmp_path / "cache", source))).values()) == ["aaa", "b", "ccc"]


def test_statistics_lie_beside_the_tokens_and_make_a_table_of_all_sources(tmp_path: Path) -> None:
    short = text_source("short", text_corpus(tmp_path / "short"))
    long = jsonl_source(tmp_path / "long", ["x" * 4095, "y" * 99_999, "z"])
    prepared = prepare(data_of(tmp_path / "cache", short, long), BYTES)
    found = {name: source.statistics for name, source in prepared.sources.items()}
    for source in prepared.sources.values():
        assert source.statistics.train == LengthStatistics.of(source.train.document_lengths)
        assert source.statistics.validation == LengthStatistics.of(source.validation.document_lengths)
    written = [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("*/statistics.json")]
    kept = [SourceStatistics.from_json(values) for values in written]
    assert all(statistics in kept for statistics in found.values())
    lines = statistics_table(found).splitlines()
    assert all(len(line) <= 84 for line in lines)
    assert lines[-1].split() == [
        *("lines", "3", "104,098", "34,699", "4,096", "100,000", "100,000", "100,000", "100.0%", "96.1%", "0.0%", "0")
    ]
    assert lines[-2].split()[:2] == ["short", str(found["short"].train.documents)]


def test_a_document_of_50_megabytes_is_kept_whole(tmp_path: Path) -> None:
    line = "0123456789abcde\n"
    text = line * (50_000_000 // len(line))
    source = jsonl_source(tmp_path / "corpus", ["first", text, "last"])
    store = only(data_of(tmp_path / "cache", source)).train
    assert store.document_lengths.tolist() == [6, len(text) + 1, 5]
    for start in (0, len(text) // 2 // 16 * 16, len(text) - 1600):
        assert bytes(store.read(1, start, start + 1600).astype(np.uint8)).decode() == line * 100
    assert store.read(1, len(text), len(text) + 1).tolist() == [256]


def test_empty_files_among_others_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files: dict[str, str | bytes] = {"a.jsonl": '{"text": "1"}', "b.jsonl": "", "c.jsonl.gz": b"", "d.jsonl": "\n\n"}
    write_files(tmp_path / "corpus", files)
    source = DataSource("jsonl", str(tmp_path / "corpus"), validation_fraction=0.0, name="lines")
    assert only(data_of(tmp_path / "cache", source)).train.documents == 1
    assert not warnings(caplog)
