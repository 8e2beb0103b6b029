"""Files of a source: what is found by folder, glob, link and name, and what is said where nothing is."""

import gzip
import os
import sysconfig
from codecs import BOM_UTF8
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tests.support.texts import refuse, text_data, texts, warnings, write_files
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.documents import Corpus
from torchtitan_cp.data.corpus.records import SkippedRecords
from torchtitan_cp.data.corpus.sources import count_repeated, unread_suffixes

STDLIB = Path(sysconfig.get_paths()["stdlib"])


def test_the_standard_library_is_found_without_what_was_installed_beside_it() -> None:
    corpus = Corpus(Data(document="file", validation_fraction=0))
    names = [file.name for file in corpus.files]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") and "site-packages" not in name and "__pycache__" not in name for name in names)
    documents = list(islice(corpus.documents(SkippedRecords()), 3))
    assert [document.content for document in documents] == [(STDLIB / name).read_text("utf-8") for name in names[:3]]
    assert 0 < documents[0].read_bytes < documents[1].read_bytes < documents[2].read_bytes <= corpus.size_bytes


def test_a_folder_gives_every_file_below_it_but_hidden_ones_in_sorted_order(tmp_path: Path) -> None:
    write_files(tmp_path, {"b.txt": "2", "a.md": "1", ".hidden": "x", "c/d.txt": "3", ".git/e.txt": "x", "c/e/f": "4"})
    assert texts(text_data(tmp_path)) == ["1", "2", "3", "4"]


def test_a_glob_gives_what_it_matches_at_any_depth(tmp_path: Path) -> None:
    write_files(tmp_path, {"b.txt": "2", "a.md": "x", "c/d.txt": "3", "c/e/f.txt": "4"})
    data = text_data(tmp_path / "**" / "*.txt")
    assert texts(data) == ["2", "3", "4"]
    assert [file.name for file in Corpus(data).files] == ["b.txt", "c/d.txt", "c/e/f.txt"]


def test_a_single_file_is_a_corpus(tmp_path: Path) -> None:
    assert texts(text_data(write_files(tmp_path, {"a[1].txt": "1"}) / "a[1].txt")) == ["1"]


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(write_files(tmp_path, {"corpus/a.txt": "1"})))
    assert texts(text_data("~/corpus")) == texts(text_data("~/corpus/*.txt")) == ["1"]


def test_links_to_folders_are_followed_each_folder_once(tmp_path: Path) -> None:
    write_files(tmp_path, {"root/a.txt": "1", "elsewhere/b.txt": "2"})
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "root")
    assert texts(text_data(tmp_path / "root")) == ["1", "2"]


def test_a_pipe_in_the_corpus_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(write_files(tmp_path, {"a.txt": "1"}) / "pipe")
    assert texts(text_data(tmp_path)) == ["1"]


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    message = refuse(text_data(tmp_path / "nowhere"))
    assert f"finds no file at data.path = '{tmp_path / 'nowhere'}'" in message
    assert "fix: set data.path to a folder of text files, or a glob" in message


def test_a_relative_path_that_is_missing_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refuse(text_data(Path("nowhere"))).endswith(f"; a path is relative to the current directory, {tmp_path}")


def test_a_source_that_needs_a_path_says_so() -> None:
    message = refuse(Data(source="jsonl"))
    assert "data.source = 'jsonl' finds no file at data.path = ''\n  fix: set data.path to *.jsonl" in message


@pytest.mark.parametrize(
    ("source", "path", "fix"),
    [("text", "", "'corpus/**/*.txt'"), ("text", "*.txt", "'corpus/**/*.txt'"), ("jsonl", "", "*.jsonl.zst files")],
)
def test_a_path_that_leads_to_no_file_is_named(tmp_path: Path, source: str, path: str, fix: str) -> None:
    data = Data(source=source, path=str(tmp_path / path))
    message = refuse(data)
    assert f"data.source = '{source}' finds no file at data.path = '{data.path}'" in message
    assert fix in message


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", scandir)
    message = refuse(text_data(tmp_path))
    assert f"a folder of the corpus cannot be listed: {tmp_path} (Permission denied)" in message
    assert "fix: make it readable" in message


def test_a_file_that_is_not_utf8_is_counted_named_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(tmp_path, {"a.txt": b"first\nsecond \xff\n", "b.txt": "good"})
    skipped_records = SkippedRecords()
    assert texts(text_data(tmp_path), skipped_records) == ["good"]
    assert skipped_records.counts == {"not UTF-8": 1}
    assert warnings(caplog) == [f"{tmp_path}/a.txt:2: not UTF-8; skipped"]


def test_a_broken_link_is_counted_named_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (write_files(tmp_path, {"b.txt": "good"}) / "a.txt").symlink_to(tmp_path / "gone")
    assert texts(text_data(tmp_path)) == ["good"]
    assert warnings(caplog) == [f"{tmp_path}/a.txt: unreadable file (No such file or directory); skipped"]


@pytest.mark.parametrize("document", ["file", "folder"])
def test_a_byte_order_mark_is_no_part_of_a_text(
    tmp_path: Path, document: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"a.txt": b"one\n", "b.txt": "zwei \ufeff\n".encode(), "c.txt": b"", "d/e.txt": b"three\n"}
    write_files(tmp_path / "plain", files)
    write_files(tmp_path / "marked", {name: BOM_UTF8 + content for name, content in files.items()})
    plain, marked = (texts(text_data(tmp_path / name, document)) for name in ("plain", "marked"))
    assert marked == plain
    assert not caplog.records
    write_files(tmp_path / "marked", {"f.txt.gz": gzip.compress(b"text")})
    assert texts(text_data(tmp_path / "marked", document)) == plain
    assert warnings(caplog) == [f"{tmp_path}/marked/f.txt.gz:1: not UTF-8; skipped"]


def test_files_that_a_source_of_rows_leaves_out_are_counted_by_suffix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("a.jsonl", "b/c.jsonl.gz", "d.json", "b/e.json", "f.jsonl.xz", "README", ".hidden")
    corpus = write_files(tmp_path / "corpus", dict.fromkeys(names, '{"text": "a"}\n{"text": "b"}'))
    source = Data(source="jsonl", path=str(corpus), cache_folder=str(tmp_path / "cache"))
    assert unread_suffixes(source) == {".json": 2, ".xz": 1, "README": 1}
    prepare(source, TokenizerConfig(kind="bytes"))
    assert "corpus: other files in its folder are not read: 2 x .json, 1 x .xz, 1 x README" in caplog.messages
    for other in (replace(source, path=f"{corpus}/*.jsonl"), replace(source, source="text")):
        assert not unread_suffixes(other)


def test_text_that_is_read_again_through_links_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where the folder of a download has its files once by content and once by name."""
    corpus = write_files(tmp_path / "corpus", {"blobs/1": "one", "blobs/2": "two", "outside": "three"})
    (corpus / "names").mkdir()
    for name, target in (("a.txt", "../blobs/1"), ("b.txt", "../blobs/2"), ("c.txt", "b.txt"), ("lost", "nowhere")):
        (corpus / "names" / name).symlink_to(target)
    linked = text_data(tmp_path / "linked")
    (tmp_path / "linked").symlink_to(corpus)
    assert count_repeated(Corpus(linked).files) == 3
    assert not count_repeated(Corpus(text_data(corpus / "names")).files[:2])
    prepare(replace(linked, cache_folder=str(tmp_path / "cache")), TokenizerConfig(kind="bytes"))
    assert "corpus: 3 of its files are links to others of them, whose text is read again" in caplog.messages
