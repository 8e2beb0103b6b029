"""JSON lines, plain or compressed. A malformed line or a damaged archive is counted, logged and skipped."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from torchtitan_cp.config.sections import SourceKeys
from torchtitan_cp.data.corpus.records import Document, SkippedRecords, SourceFile, read_row

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
CHUNK_BYTES = 1 << 17


def read_jsonl(file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Document]:
    """The text (or tokens) of each line of a file. Lines before a damaged part of an archive are kept."""
    number = 0
    try:
        with open(file.path, "rb") as raw:
            for number, line in enumerate(_lines(raw, file.path.suffix), start=1):
                try:
                    text = line.decode("utf-8").strip()
                    row = json.loads(text) if text else None
                except UnicodeDecodeError:
                    skipped.add("not UTF-8", f"{file.path}:{number}")
                except (ValueError, RecursionError):
                    skipped.add("malformed JSON", f"{file.path}:{number}")
                else:
                    if text:
                        yield from read_row(row, number, file, raw.tell(), source, skipped)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        skipped.add("rest of a damaged archive", f"{file.path}:{number + 1} ({error})")
    except OSError as error:
        skipped.add(f"unreadable file ({error.strerror})", str(file.path))


def _lines(raw: BinaryIO, suffix: str) -> Iterator[bytes]:
    if suffix == ".gz":
        return iter(gzip.GzipFile(fileobj=raw))
    return _split_lines(_decompress_zst(raw)) if suffix == ".zst" else iter(raw)


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their ends; the chunks of a long line are joined once, at its end."""
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

    zstandard's own stream_reader accepts a file that ends inside a frame as whole; here that is an EOFError.
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
