"""What sources yield: files, the documents in them, and the number of records that cannot be read."""

import errno
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan_cp.config.json_types import Json, JsonObject
from torchtitan_cp.data.errors import DataError

logger = logging.getLogger(__name__)

LOGGED_OF_A_KIND = 5


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus.

    Attributes:
        name: path relative to the corpus's root, with `/`; part of the keys of its records.
        path: where it is.
        size_bytes, mtime_ns: from the file system; 0 if unknown.
    """

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int

    @property
    def folder(self) -> str:
        """The part of the name before the last `/`."""
        return self.name.rpartition("/")[0]


@dataclass
class Document:
    """A unit of text that the model may attend over: a file, a row, or the joined files of a folder.

    Attributes:
        content: text, not empty, encodable as UTF-8; or token ids `[n]` int64, n > 0, none negative.
        key: its name in the corpus, whose hash decides whether it is held out; for joined files, the first one's.
        group: name of the folder, repository or other group that it belongs to; None: no group.
        read_bytes: bytes read from the corpus up to the document's end; readers count from the start of the file.
        held_out: the document belongs to the validation split; set by the corpus, like resume_point.
        resume_point: the index of the file from which to read again to get the document (if files are joined, the
            folder's first), what was skipped before that file, by kind, and the document's number from there, from 1.
        row: a conversation, whose content is empty: its template writes the text.
        where: path and number of the conversation, for messages.
    """

    content: str | np.ndarray
    key: str
    group: str | None
    read_bytes: int
    held_out: bool = False
    resume_point: tuple[int, dict[str, int], int] = (0, {}, 0)
    row: Mapping[str, object] | None = None
    where: str = ""


class BadRecordError(Exception):
    """A record cannot be read or learned from. Args: the kind of problem, which is counted, and details to log."""


class RepeatedKeys:
    """Builds the objects of a JSON text, and finds keys that one has twice, of which Python keeps the last value.

    Called by a JSON decoder as its `object_pairs_hook`.
    """

    def __init__(self) -> None:
        self.found = list[str]()

    def __call__(self, pairs: list[tuple[str, Json]]) -> JsonObject:
        values = dict(pairs)
        if len(values) < len(pairs):
            self.found += [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        return values

    def check(self) -> None:
        """Raise BadRecordError if a key was found, and forget it."""
        found, self.found = self.found, []
        if found:
            raise BadRecordError("JSON object with a key twice", repr(found[0]))


def parse_json(text: str, problem: str) -> Json:
    """The value of a JSON text.

    Raises:
        BadRecordError: an object of it has a key twice; or of kind `problem` if the text is not JSON.
    """
    repeated = RepeatedKeys()
    try:
        value: Json = json.loads(text, object_pairs_hook=repeated)
    except (ValueError, RecursionError) as error:
        raise BadRecordError(problem, str(error)) from error
    repeated.check()
    return value


class SkippedRecords:
    """Counts what cannot be read, by kind, and logs the first few of each kind.

    Args:
        counts: what was skipped before, by kind.
        quiet: only count and log nothing, for a second pass over a corpus.

    Attributes:
        counts: how many were skipped, by kind.
    """

    def __init__(self, counts: dict[str, int] | None = None, *, quiet: bool = False) -> None:
        self.counts = Counter(counts)
        self._quiet = quiet

    def add(self, kind: str, where: str) -> None:
        """Count one more of `kind`; `where` is its path, with the line if it has one."""
        self.counts[kind] += 1
        if not self._quiet and self.counts[kind] <= LOGGED_OF_A_KIND:
            logger.warning("%s: %s; skipped", where, kind)

    def add_unreadable(self, error: OSError, file: SourceFile, read: int = 0) -> None:
        """Count a file that nobody may read, or a link that leads nowhere.

        Args:
            read: records of the file that were read before.

        Raises:
            DataError: it could be read a moment ago, so a disk, a network or the system fails, and not the file.
        """
        reason = os.strerror(error.errno or errno.EIO)
        if read or (file.mtime_ns and not isinstance(error, PermissionError)):
            raise DataError(
                f"{file.path} cannot be read{f' after record {read}' * bool(read)}: {reason}",
                fix="see to the disk or the network that it is on, then start again: what is tokenized is kept; or "
                "give a path that leaves the file out",
            ) from error
        self.add(f"unreadable file ({reason})", str(file.path))

    @contextmanager
    def skipping(self, where: str) -> Iterator[None]:
        """Count the record at `where` as skipped if the block finds that it cannot be read, and go on.

        Raises:
            DataError: as the block raises it, with `where` in its message.
        """
        try:
            yield
        except BadRecordError as error:
            kind, *details = error.args
            self.add(kind, where + "".join(f" ({detail})" for detail in details))
        except UnicodeDecodeError:
            self.add("not UTF-8", where)
        except DataError as error:
            raise DataError(f"{where}: {error.message}", fix=error.fix) from None

    def summary(self) -> str:
        """The counts in one line, e.g. `7 x malformed JSON, 2 x not UTF-8`; empty if nothing was skipped."""
        return ", ".join(f"{count} x {kind}" for kind, count in sorted(self.counts.items()))
