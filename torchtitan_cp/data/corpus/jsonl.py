"""JSON lines, plain or compressed. Whatever is wrong with a line or an archive is counted, named and skipped."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import zstandard

from torchtitan_cp.config.sections import SourceKeys
from torchtitan_cp.data.corpus.record import Record, SourceFile
from torchtitan_cp.data.corpus.rows import read_row
from torchtitan_cp.data.corpus.skipped_records import SkippedRecords

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
CHUNK_BYTES = 1 << 17


def read_jsonl(file: SourceFile, source: SourceKeys, skipped_records: SkippedRecords) -> Iterator[Record]:
    """The text (or tokens) of each line of a file. Lines before a damaged part of an archive are kept."""
    number = 0
    try:
        with open(file.path, "rb") as raw:
            for number, line in enumerate(_lines(raw, file.path.suffix), start=1):
                found = _read_line(line, source, f"{file.path}:{number}", skipped_records)
                if found:
                    yield Record(found[0], f"{file.name}:{number}", raw.tell(), found[1])
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        skipped_records.add("rest of a damaged archive", f"{file.path}:{number + 1} ({error})")
    except OSError as error:
        skipped_records.add(f"unreadable file ({error.strerror})", str(file.path))


def _read_line(
    line: bytes, source: SourceKeys, where: str, skipped_records: SkippedRecords
) -> tuple[str | np.ndarray, str | None] | None:
    """See read_row. None for a blank line, too."""
    try:
        decoded = line.decode("utf-8").strip()
        row = json.loads(decoded) if decoded else None
    except UnicodeDecodeError:
        skipped_records.add("not UTF-8", where)
        return None
    except (ValueError, RecursionError):
        skipped_records.add("malformed JSON", where)
        return None
    return read_row(row, source, where, skipped_records) if decoded else None


def _lines(raw: BinaryIO, suffix: str) -> Iterator[bytes]:
    if suffix == ".gz":
        return iter(gzip.GzipFile(fileobj=raw))
    if suffix == ".zst":
        return _split_lines(_decompress_zst(raw))
    return iter(raw)


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their ends; a line of many chunks is put together once, at its end."""
    parts: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        parts.append(first)
        for other in others:
            yield b"".join(parts)
            parts = [other]
    if last := b"".join(parts):
        yield last


def _decompress_zst(raw: BinaryIO) -> Iterator[bytes]:
    """The content of all frames.

    zstandard's own stream_reader takes a file that ends inside a frame for a whole one; here that is an EOFError.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # as `zstd --long=31` writes
    frame = None
    while chunk := raw.read(CHUNK_BYTES):
        while chunk:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(chunk)
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends inside a compressed frame")
