"""What sources hand over: files, and the passages of text or tokens in them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus as it was found.

    Attributes:
        name: path relative to the corpus's root, with `/`; decides with others of its kind what is held out.
        path: where it is.
        size_bytes, mtime_ns: as the file system says; 0 where it does not.
    """

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int

    @property
    def folder(self) -> str:
        """The part of the name before the last `/`."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True)
class Record:
    """What is held out, or trained on, as a whole: a file, or a row.

    Attributes:
        content: text, not empty, encodable as UTF-8; or token ids `[n]` int64, n > 0, none negative.
        key: names it in the corpus; its hash decides whether it is held out.
        position_bytes: how much of its file (as it is on disk) was read up to its end.
        group: names what it belongs to, as a folder or a repository; None: related to no other.
    """

    content: str | np.ndarray
    key: str
    position_bytes: int
    group: str | None = None
