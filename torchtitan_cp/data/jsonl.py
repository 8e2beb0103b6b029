"""JSON lines, plain or compressed. Whatever is wrong with a line or an archive is counted, named and skipped."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from torchtitan_cp.config.sections import Data
from torchtitan_cp.data.passage import Passage, SourceFile
from torchtitan_cp.data.rejects import Rejects

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
CHUNK_BYTES = 1 << 17


def read_jsonl(file: SourceFile, data: Data, rejects: Rejects) -> Iterator[Passage]:
    """The text field of each line of a file. Lines before a damaged part of an archive are kept."""
    number = 0
    try:
        with open(file.path, "rb") as raw:
            for number, line in enumerate(_lines(raw, file.path.suffix), start=1):
                text = _text_of(line, data.text_field, f"{file.path}:{number}", rejects)
                if text:
                    yield Passage(text, key=f"{file.name}:{number}", position_bytes=raw.tell())
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        rejects.add("rest of a damaged archive", f"{file.path}:{number + 1} ({error})")
    except OSError as error:
        rejects.add(f"unreadable file ({error.strerror})", str(file.path))


def _text_of(line: bytes, field: str, where: str, rejects: Rejects) -> str:
    """The field's text; empty for a blank line, and for one that went to the rejects."""
    try:
        decoded = line.decode("utf-8").strip()
        record = json.loads(decoded) if decoded else {field: ""}
    except UnicodeDecodeError:
        rejects.add("not UTF-8", where)
        return ""
    except (ValueError, RecursionError):
        rejects.add("malformed JSON", where)
        return ""
    if not isinstance(record, dict) or field not in record:
        rejects.add(f"line without the field {field!r}", where)
        return ""
    text = record[field]
    if not isinstance(text, str):
        rejects.add(f"field {field!r} that is not a string", where)
        return ""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        rejects.add(f"field {field!r} with half a surrogate pair", where)
        return ""
    return text


def _lines(raw: BinaryIO, suffix: str) -> Iterator[bytes]:
    if suffix == ".gz":
        return iter(gzip.GzipFile(fileobj=raw))
    if suffix == ".zst":
        return _split_lines(_decompress_zst(raw))
    return iter(raw)


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


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
