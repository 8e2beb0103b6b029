"""Rows of JSON lines, of Parquet and of datasets: text, token ids and groups; whole and damaged."""

import errno
import gzip
import importlib
import json
import os
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.row_files import rows_data, write_parquet
from tests.support.texts import read, refuse, texts, warnings, write_files
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus import rows
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.documents import check_corpus
from torchtitan_cp.data.corpus.records import SkippedRecords
from torchtitan_cp.data.corpus.rows import zstd
from torchtitan_cp.data.errors import DataError

LINES = [f"row {index} ä" for index in range(700)]
BYTES = TokenizerConfig(kind="bytes")


def test_parquet_gives_its_rows_in_order_over_row_groups_and_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"text": LINES[:400], "other": range(400)})
    write_parquet(tmp_path / "b" / "c.parquet", {"text": pa.array(LINES[400:], pa.large_string())})
    write_files(tmp_path, {"notes.txt": "x"})
    documents = read(rows_data("parquet", tmp_path))
    assert [document.content for document in documents] == LINES
    ends = [document.read_bytes for document in documents]
    assert ends == sorted(ends)
    assert ends[-1] == sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    assert texts(rows_data("parquet", tmp_path / "*" / "*.parquet")) == LINES[400:]


def test_rows_of_parquet_that_are_no_text_are_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"\xffo")]
    )
    write_parquet(tmp_path / "a.parquet", {"text": ["good", None, ""]})
    write_parquet(tmp_path / "b.parquet", {"text": raw})
    write_parquet(tmp_path / "c.parquet", {"content": ["elsewhere"]})
    write_parquet(tmp_path / "d.parquet", {"text": [1]})
    write_files(tmp_path, {"e.parquet": b"PAR1 but no more", "f.parquet": b""})
    write_parquet(tmp_path / "g.parquet", {"text": [{"of": "a struct"}]})
    skipped_records = SkippedRecords()
    assert texts(rows_data("parquet", tmp_path), skipped_records) == ["good", "o"]
    lines = warnings(caplog)
    assert lines[3] == f"{tmp_path}/c.parquet (its columns: content): Parquet file without the column 'text'; skipped"
    assert [line.split(" (")[0] for line in lines] == [
        f"{tmp_path}/a.parquet:2: field 'text' that is not a string; skipped",
        f"{tmp_path}/a.parquet:3: field 'text' that is empty; skipped",
        f"{tmp_path}/b.parquet:1: not UTF-8; skipped",
        f"{tmp_path}/c.parquet",
        f"{tmp_path}/d.parquet:1: field 'text' that is not a string; skipped",
        f"{tmp_path}/e.parquet",
        f"{tmp_path}/f.parquet",
        f"{tmp_path}/g.parquet:1: field 'text' that is not a string; skipped",
    ]
    assert skipped_records.counts["not Parquet"] == 2


def test_what_is_no_list_of_token_ids_is_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = ["[1, 2]", '"text"', "[1.5]", "[[1], [2, 3]]", "null", "[-1]", "[true]", "[99999999999999999999]", "3"]
    values.append(f"[{1 << 63}]")  # NumPy reads it as uint64
    write_files(tmp_path, {"a.jsonl": "\n".join(f'{{"ids": {value}}}' for value in values)})
    [document] = read(rows_data("jsonl", tmp_path, token_field="ids"))
    assert list(document.content) == [1, 2]
    where = f"{tmp_path}/a.jsonl"
    assert warnings(caplog) == [
        *(f"{where}:{line}: field 'ids' that is not a list of token ids; skipped" for line in (2, 3, 4, 5)),
        f"{where}:6: field 'ids' with a negative token id; skipped",
        f"{where}:7: field 'ids' that is not a list of token ids; skipped",
    ]
    folder = tmp_path / "unsigned"
    folder.mkdir()
    parquet.write_table(pa.table({"ids": pa.array([[1 << 63], [7]], pa.list_(pa.uint64()))}), folder / "a.parquet")
    [document] = read(rows_data("parquet", folder, token_field="ids"))
    assert list(document.content) == [7]
    write_files(tmp_path / "none", {"a.jsonl": '{"ids": "text"}'})
    with pytest.raises(DataError) as caught:
        read(rows_data("jsonl", tmp_path / "none", token_field="ids"))
    assert "check path, source and the *_field keys of" in str(caught.value.fix)


def test_a_field_names_the_group_of_a_row(tmp_path: Path) -> None:
    rows = [{"text": "1", "repo": "x"}, {"text": "2"}, {"text": "3", "repo": 7}, {"text": "4", "repo": None}]
    write_files(tmp_path / "j", {"a.jsonl": "\n".join(map(json.dumps, rows))})
    write_parquet(tmp_path / "p" / "a.parquet", {"text": ["1", "2"], "repo": ["x", None]})
    groups = [document.group for document in read(rows_data("jsonl", tmp_path / "j", group_field="repo"))]
    assert groups == ["x", None, "7", None]
    assert [document.group for document in read(rows_data("parquet", tmp_path / "p", group_field="repo"))] == [
        "x",
        None,
    ]
    assert {document.group for document in read(rows_data("jsonl", tmp_path / "j"))} == {None}


@pytest.fixture
def offline_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline_datasets")
def test_a_dataset_is_streamed_from_a_folder_of_data_files_and_from_what_save_to_disk_wrote(tmp_path: Path) -> None:
    content = "\n".join(json.dumps({"text": line, "repo": "r"}) for line in LINES)
    write_files(tmp_path / "files", {"train.jsonl": content, "test.jsonl": '{"text": "held", "repo": "s"}'})
    table = datasets.table.InMemoryTable.from_pydict({"text": LINES})
    made = datasets.Dataset(table, fingerprint="rows")
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "several"))
    for name in ("files", "one", "several"):
        assert texts(rows_data("huggingface", tmp_path / name)) == LINES
    [held] = read(rows_data("huggingface", tmp_path / "files", split="test", group_field="repo"))
    assert (held.content, held.group) == ("held", "s")


@pytest.mark.usefixtures("offline_datasets")
def test_a_dataset_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_files(tmp_path / "files", {"train.jsonl": '{"text": "one"}'})
    message = refuse(rows_data("huggingface", tmp_path / "files", split="nowhere"))
    assert f"data: the dataset '{tmp_path}/files' cannot be read after 0 rows: " in message
    assert "fix: give a folder, or a name this machine can reach, and a subset and split of it" in message
    assert "the dataset 'no/such-dataset' cannot be read" in refuse(rows_data("huggingface", "no/such-dataset"))
    assert "finds no file at data.path = ''\n  fix: set data.path to a dataset's name" in refuse(
        rows_data("huggingface", "")
    )


@pytest.mark.usefixtures("offline_datasets")
def test_a_dataset_becomes_tokens_and_is_found_again_until_it_changes(tmp_path: Path) -> None:
    write_files(tmp_path / "files", {"train.jsonl": json.dumps({"text": "one"})})
    data = rows_data("huggingface", tmp_path / "files", cache_folder=str(tmp_path / "cache"))
    assert prepare(data, BYTES).sources["corpus"].train.tokens == 4
    assert prepare(data, BYTES).sources["corpus"].train.tokens == 4
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 1
    write_files(tmp_path / "files", {"train.jsonl": json.dumps({"text": "another"})})
    assert prepare(data, BYTES).sources["corpus"].train.tokens == 8


@pytest.mark.parametrize(("source", "package"), [("parquet", "pyarrow"), ("huggingface", "datasets")])
def test_a_missing_extra_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, package: str
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError) as caught:
        check_corpus(rows_data(source, tmp_path))
    extra = "parquet" if source == "parquet" else "hub"
    assert f"data.source = '{source}' needs the package `{package}`, which is not installed" in str(caught.value)
    assert f"fix: {sys.executable} -m pip install 'torchtitan-cp[{extra}]'" in str(caught.value)


JSON_LINES = [f"line {index} of the corpus ä\nwith a newline in it" for index in range(3000)]
CONTENT = "".join(json.dumps({"text": line, "other": 1}) + "\n" for line in JSON_LINES).encode()


def jsonl_data(path: Path, validation_fraction: float = 0.0, text_field: str = "text") -> Data:
    return Data(source="jsonl", path=str(path), validation_fraction=validation_fraction, text_field=text_field)


def test_plain_and_compressed_files_give_the_same_documents(tmp_path: Path) -> None:
    frames = [zstd.compress(part) for part in (CONTENT[:1000], b"", CONTENT[1000:])]
    packed = {"a.jsonl": CONTENT, "a.jsonl.gz": gzip.compress(CONTENT), "a.jsonl.zst": b"".join(frames)}
    for name, content in packed.items():
        path = write_files(tmp_path, {name: content}) / name
        skipped_records = SkippedRecords()
        assert texts(jsonl_data(path), skipped_records) == JSON_LINES
        assert not skipped_records.counts
        assert read(jsonl_data(path))[-1].read_bytes == len(content)


def test_a_folder_and_a_glob_find_files_by_suffix(tmp_path: Path) -> None:
    line = b'{"text": "%d"}\n'
    write_files(
        tmp_path, {"a.jsonl": line % 1, "b/c.jsonl.gz": gzip.compress(line % 2), "notes.txt": "x", ".d.jsonl": ""}
    )
    assert texts(jsonl_data(tmp_path)) == ["1", "2"]
    assert texts(jsonl_data(tmp_path / "**" / "*.gz")) == ["2"]


def test_a_malformed_line_is_counted_named_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": "cut',
        b"",
        b'{"content": "elsewhere"}',
        b'["text"]',
        b'{"text": 5}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": ""}',
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    path = write_files(tmp_path, {"a.jsonl": b"\n".join(lines)}) / "a.jsonl"
    skipped_records = SkippedRecords()
    assert texts(jsonl_data(tmp_path), skipped_records) == ["good", "last"]
    *others, last = warnings(caplog)
    assert others == [
        f"{path}:2 (Unterminated string starting at: line 1 column 10 (char 9)): malformed JSON; skipped",
        f"{path}:4 (its fields: content): no field 'text'; skipped",
        f"{path}:5 (its fields: none): no field 'text'; skipped",
        f"{path}:6: field 'text' that is not a string; skipped",
        f"{path}:7: not UTF-8; skipped",
        f"{path}:8: field 'text' with a lone surrogate; skipped",
        f"{path}:9: field 'text' that is empty; skipped",
    ]
    assert re.fullmatch(re.escape(f"{path}:10 (") + r".+\): malformed JSON; skipped", last)
    assert skipped_records.counts.total() == 8


@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_that_is_one_json_array_gives_its_entries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, indent: int | None
) -> None:
    rows = [{"text": "first"}, {"content": "elsewhere"}, {"text": "\ud800"}, {"text": "last [1]"}]
    content = BOM_UTF8 + json.dumps(rows, indent=indent).encode()
    files = {"a.json": content, "b.jsonl": content, "c.jsonl.gz": gzip.compress(content), "d.json": content[:-9]}
    path = write_files(tmp_path, files)
    for name in ("a.json", "b.jsonl", "c.jsonl.gz"):
        skipped_records = SkippedRecords()
        assert texts(jsonl_data(path / name), skipped_records) == ["first", "last [1]"]
        assert skipped_records.summary() == "1 x field 'text' with a lone surrogate, 1 x no field 'text'"
    assert warnings(caplog)[0] == f"{path / 'a.json'}:2 (its fields: content): no field 'text'; skipped"
    assert read(jsonl_data(path / "a.json"))[0].read_bytes < len(content) / 2
    assert texts(jsonl_data(path / "d.json"), skipped_records) == ["first"]
    assert "1 x rest of a damaged JSON array" in skipped_records.summary()


def test_a_row_with_a_key_twice_is_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Python would keep the last value, and lose the text of the first."""
    doubled = ['{"text": "lost", "text": "kept"}', '{"text": "b", "a": [{"c": 1, "c": 2}]}']
    rows = ['{"text": "first"}', *doubled, '{"text": "last"}']
    path = write_files(tmp_path, {"a.jsonl": "\n".join(rows), "b.json": f"[{', '.join(rows)}]"})
    for name in ("a.jsonl", "b.json"):
        caplog.clear()
        skipped_records = SkippedRecords()
        assert texts(jsonl_data(path / name), skipped_records) == ["first", "last"]
        assert warnings(caplog) == [
            f"{path / name}:2 ('text'): JSON object with a key twice; skipped",
            f"{path / name}:3 ('c'): JSON object with a key twice; skipped",
        ]


def test_a_byte_order_mark_and_line_ends_of_windows_are_no_part_of_a_row(tmp_path: Path) -> None:
    content = BOM_UTF8 + b'{"text": "first"}\r\n{"text": "second"}\r\n'
    joined = content * 2  # as `cat` joins files
    packed = {".gz": gzip.compress(joined), ".zst": zstd.compress(content) * 2}
    files = {"a.jsonl": joined} | {f"a.jsonl{suffix}": archive for suffix, archive in packed.items()}
    skipped_records = SkippedRecords()
    assert texts(jsonl_data(write_files(tmp_path, files)), skipped_records) == ["first", "second"] * 6
    assert not skipped_records.counts


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": '{"content": "here"}'})
    assert texts(jsonl_data(tmp_path, text_field="content")) == ["here"]


def damaged(packed: bytes, how: str) -> bytes:
    if how == "truncated":
        return packed[: len(packed) // 2]
    middle = len(packed) // 2
    return packed[:middle] + bytes(byte ^ 0xFF for byte in packed[middle : middle + 64]) + packed[middle + 64 :]


@pytest.mark.parametrize("how", ["truncated", "overwritten"])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_lines_before_the_damage_of_an_archive_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, how: str
) -> None:
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    packed = (
        gzip.compress(CONTENT)
        if suffix == "gz"
        else b"".join(zstd.compress(CONTENT[at : at + 2000], options=checked) for at in range(0, len(CONTENT), 2000))
    )
    path = write_files(tmp_path, {f"a.jsonl.{suffix}": damaged(packed, how), "b.jsonl": '{"text": "next"}'})
    skipped_records = SkippedRecords()
    *kept, after = texts(jsonl_data(tmp_path), skipped_records)
    assert after == "next"
    assert 0 < len(kept) < len(JSON_LINES)
    if suffix == "zst":  # deflate has no checksum but at the end: a line near the damage may come out wrong
        assert kept == JSON_LINES[: len(kept)]
    assert skipped_records.counts["rest of a damaged archive"] == 1
    named = [line for line in warnings(caplog) if line.startswith(f"{path}/a.jsonl.{suffix}:") and "damaged" in line]
    assert len(named) == 1


def test_an_archive_that_is_none_is_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(tmp_path, {"a.jsonl.gz": CONTENT, "b.jsonl.zst": CONTENT, "c.jsonl": '{"text": "good"}'})
    skipped_records = SkippedRecords()
    assert texts(jsonl_data(tmp_path), skipped_records) == ["good"]
    assert skipped_records.counts == {"archive that cannot be read": 2}
    assert [line.split(" (")[0] for line in warnings(caplog)] == [
        f"{tmp_path}/a.jsonl.gz:1",
        f"{tmp_path}/b.jsonl.zst:1",
    ]


def test_no_room_for_the_window_of_an_archive_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Iterator[bytes]:
        yield b'{"text": "first"}'
        raise zstd.ZstdError("Unable to decompress Zstandard data: Allocation error : not enough memory")

    monkeypatch.setattr(zstd, "ZstdFile", full)
    path = write_files(tmp_path, {"a.jsonl.zst": b""}) / "a.jsonl.zst"
    with pytest.raises(DataError) as caught:
        read(jsonl_data(tmp_path))
    assert caught.value.message == f"there is too little memory to read {path}"
    assert "--long" in caught.value.fix


@pytest.mark.parametrize("lines_before", [0, 1])
def test_a_disk_that_fails_ends_the_pass_instead_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines_before: int
) -> None:
    def fail(*_: Any) -> Iterator[bytes]:
        yield from [b'{"text": "first"}'] * lines_before
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(rows, "_lines", fail)
    path = write_files(tmp_path, {"a.jsonl": CONTENT}) / "a.jsonl"
    with pytest.raises(DataError) as caught:
        read(jsonl_data(tmp_path))
    after = " after record 1" * lines_before
    assert caught.value.message == f"{path} cannot be read{after}: Input/output error"
    assert "what is tokenized is kept" in caught.value.fix


def test_lines_are_held_out_one_by_one(tmp_path: Path) -> None:
    documents = read(jsonl_data(write_files(tmp_path, {"a.jsonl": CONTENT}), validation_fraction=0.2))
    assert [document.content for document in documents] == JSON_LINES
    assert abs(sum(document.held_out for document in documents) - 600) < 5 * 22  # five standard deviations
