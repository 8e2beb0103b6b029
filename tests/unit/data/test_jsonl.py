"""JSON lines, plain and compressed, whole and damaged."""

import errno
import gzip
import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.texts import read, texts, warnings, write_files
from torchtitan_cp.config.sections import Data
from torchtitan_cp.data.corpus import rows
from torchtitan_cp.data.corpus.records import SkippedRecords
from torchtitan_cp.data.corpus.rows import zstd
from torchtitan_cp.data.errors import DataError

LINES = [f"line {index} of the corpus ä\nwith a newline in it" for index in range(3000)]
CONTENT = "".join(json.dumps({"text": line, "other": 1}) + "\n" for line in LINES).encode()


def jsonl_data(path: Path, validation_fraction: float = 0.0, text_field: str = "text") -> Data:
    return Data(source="jsonl", path=str(path), validation_fraction=validation_fraction, text_field=text_field)


def test_plain_and_compressed_files_give_the_same_documents(tmp_path: Path) -> None:
    frames = [zstd.compress(part) for part in (CONTENT[:1000], b"", CONTENT[1000:])]
    packed = {"a.jsonl": CONTENT, "a.jsonl.gz": gzip.compress(CONTENT), "a.jsonl.zst": b"".join(frames)}
    for name, content in packed.items():
        path = write_files(tmp_path, {name: content}) / name
        skipped_records = SkippedRecords()
        assert texts(jsonl_data(path), skipped_records) == LINES
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
    assert 0 < len(kept) < len(LINES)
    if suffix == "zst":  # deflate has no checksum but at the end: a line near the damage may come out wrong
        assert kept == LINES[: len(kept)]
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
    assert [document.content for document in documents] == LINES
    assert abs(sum(document.held_out for document in documents) - 600) < 5 * 22  # five standard deviations
