"""Small corpora for the tests of this room."""

import logging
from pathlib import Path

import pytest

from torchtitan_cp.config.data import Data, SourceKeys
from torchtitan_cp.data.corpus.documents import Corpus
from torchtitan_cp.data.corpus.records import Document, SkippedRecords
from torchtitan_cp.data.errors import DataError

REPOSITORY = Path(__file__).parents[2]


def write_files(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Write files by relative name. Returns the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def text_corpus(folder: Path, files: int = 40) -> Path:
    """A folder of short texts in three subfolders, no two the same."""
    return write_files(
        folder,
        {
            f"part{index % 3}/{index:03d}.txt": "".join(
                f"{index} and {line}: the quick brown fox\n\tjumps over a lazy dog.  \n"
                for line in range(index % 5 + 1)
            )
            for index in range(files)
        },
    )


def text_data(path: Path | str, document: str = "file", validation_fraction: float = 0.0) -> Data:
    return Data(source="text", path=str(path), document=document, validation_fraction=validation_fraction)


def read(data: SourceKeys, skipped_records: SkippedRecords | None = None) -> list[Document]:
    return list(Corpus(data).documents(skipped_records or SkippedRecords()))


def texts(data: SourceKeys, skipped_records: SkippedRecords | None = None) -> list[str]:
    return [str(document.content) for document in read(data, skipped_records)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def refuse(data: Data) -> str:
    with pytest.raises(DataError) as caught:
        read(data)
    return str(caught.value)
