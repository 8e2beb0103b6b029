"""Files to documents: how they are split, joined, held out and known again, and what is said of the rest."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.texts import read, refuse, text_corpus, text_data, texts, warnings, write_files
from torchtitan_cp.config.data import Data
from torchtitan_cp.data.corpus.documents import JOINED_BYTES, Corpus, check_corpus, is_held_out
from torchtitan_cp.data.corpus.records import SkippedRecords
from torchtitan_cp.data.corpus.sources import SOURCES
from torchtitan_cp.data.errors import DataError


def test_the_check_finds_what_reading_would(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="finds no file"):
        check_corpus(text_data(tmp_path))
    check_corpus(text_data(write_files(tmp_path, {"a.txt": "1"})))
    check_corpus(Data())


def test_rows_that_are_read_as_plain_text_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = write_files(tmp_path / "rows", {"a.jsonl": '{"text": "1"}'})
    check_corpus(text_data(write_files(tmp_path / "texts", {"a.txt": "1"})))
    assert not caplog.messages
    check_corpus(text_data(rows))
    wanted = f"data.source = 'text' reads {rows}/a.jsonl with its braces and quotes; 'jsonl' reads its rows"
    assert caplog.messages == [wanted]


def test_a_corpus_without_a_document_says_what_was_skipped(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": b"\xff", "b.txt": ""})
    message = refuse(text_data(tmp_path))
    assert f"the corpus at {tmp_path} holds no document; files: 2; skipped: 1 x not UTF-8" in message
    assert "fix: check path, source and the *_field keys of data" in message


def test_a_file_that_is_gone_ends_the_pass_and_one_that_may_not_be_read_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_files(tmp_path, {"a.txt": "first", "b.txt": "good"})
    corpus, whole = Corpus(text_data(tmp_path)), Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "a.txt":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return whole(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        assert [document.content for document in corpus.documents(SkippedRecords())] == ["good"]
    assert warnings(caplog) == [f"{tmp_path}/a.txt: unreadable file (Permission denied); skipped"]
    (tmp_path / "b.txt").unlink()  # as a network folder that is gone
    with pytest.raises(DataError) as caught:
        list(corpus.documents(SkippedRecords()))
    assert caught.value.message == f"{tmp_path}/b.txt cannot be read: No such file or directory"


def test_files_that_are_read_otherwise_than_before_are_a_changed_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = text_data(write_files(tmp_path, {"a.txt": "text"}))
    before = Corpus(data).fingerprint
    monkeypatch.setitem(SOURCES, "text", replace(SOURCES["text"], version=SOURCES["text"].version + 1))
    assert Corpus(data).fingerprint != before


def test_empty_files_are_skipped_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(tmp_path, {"a.txt": "", "b.txt": "good"})
    assert texts(text_data(tmp_path)) == ["good"]
    assert not caplog.records


def test_a_folders_files_join_in_order_each_ending_with_a_newline(tmp_path: Path) -> None:
    write_files(tmp_path, {"b": "two\n", "a": "one", "c/d": "four", "c/e": "five", "z": "three\n\n"})
    assert texts(text_data(tmp_path, "folder")) == ["one\ntwo\nthree\n\n", "four\nfive\n"]


def test_a_joined_document_ends_before_it_outgrows_its_limit(tmp_path: Path) -> None:
    half, large = "é" * (JOINED_BYTES // 4 - 1) + "\n", "x" * (JOINED_BYTES + 5)
    write_files(tmp_path, {"a": half, "b": half, "c": "ccc\n", "d": large, "e": "e\n"})
    assert texts(text_data(tmp_path, "folder")) == [half + half, "ccc\n", large + "\n", "e\n"]


def test_files_are_split_before_they_are_joined(tmp_path: Path) -> None:
    text_corpus(tmp_path)
    single = read(text_data(tmp_path, "file", 0.3))
    joined = read(text_data(tmp_path, "folder", 0.3))
    assert len(joined) == 6
    for held_out in (False, True):
        parts = ["".join(str(x.content) for x in documents if x.held_out == held_out) for documents in (single, joined)]
        assert parts[0] == parts[1] != ""


@settings(deadline=None)
@given(st.text(min_size=1), st.floats(0, 1))
def test_what_is_held_out_stays_so_when_the_fraction_grows(key: str, fraction: float) -> None:
    assert not is_held_out(key, 0)
    assert is_held_out(key, 1)
    assert is_held_out(key, fraction) <= is_held_out(key, min(1, fraction * 1.5))


def test_about_the_fraction_of_records_is_held_out() -> None:
    count = sum(is_held_out(f"folder/{index}.txt", 0.1) for index in range(10_000))
    assert abs(count - 1000) < 5 * 30  # five standard deviations


def test_the_fingerprint_follows_files_and_settings(tmp_path: Path) -> None:
    path = write_files(tmp_path, {"a.txt": "1"}) / "a.txt"
    data = text_data(tmp_path)
    first = Corpus(data).fingerprint
    assert Corpus(data).fingerprint == first
    assert Corpus(text_data(tmp_path, "folder")).fingerprint != first
    assert Corpus(text_data(tmp_path, "file", 0.5)).fingerprint != first
    os.utime(path, ns=(0, 0))
    touched = Corpus(data).fingerprint
    path.write_text("12")
    os.utime(path, ns=(0, 0))
    assert len({first, touched, Corpus(data).fingerprint}) == 3
