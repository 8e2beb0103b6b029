"""What a finished folder of tokens holds, written last, and read first to see whether it still does."""

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The contents of one folder of the cache.

    Attributes:
        format_version: of the layout.
        settings: keys of the source and of `[tokenizer]` it was made with; two folders with the same ones differ
            because files changed.
        corpus_fingerprint: Corpus.fingerprint when it was made.
        tokenizer_fingerprint: of the tokenizer used, trained ones too.
        content_fingerprint: sha256 of the tokens, document lengths and groups of both splits.
        vocab_size: V.
        documents, tokens: counts by split.
        file_bytes: size of every other file in the folder.
    """

    format_version: int
    settings: dict[str, Any]
    corpus_fingerprint: str
    tokenizer_fingerprint: str
    content_fingerprint: str
    vocab_size: int
    documents: dict[str, int]
    tokens: dict[str, int]
    file_bytes: dict[str, int]

    def write(self, folder: Path) -> None:
        """Write it into the folder it describes."""
        (folder / MANIFEST_FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest; None where there is none or it cannot be read."""
    try:
        return Manifest(**json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def file_sizes(folder: Path) -> dict[str, int]:
    """Size in bytes of each file of a folder but the manifest; another rank may be deleting it meanwhile."""
    sizes = {}
    with suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            with suppress(FileNotFoundError):
                if path.name != MANIFEST_FILE:
                    sizes[path.name] = path.stat().st_size
    return sizes


def find_damage(folder: Path) -> str:
    """What is wrong with an existing folder, in words; empty if it is as its manifest says."""
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{MANIFEST_FILE} is missing or unreadable"
    sizes = file_sizes(folder)
    for name, size in manifest.file_bytes.items():
        if sizes.get(name) != size:
            return f"{name} has {sizes[name]} bytes instead of {size}" if name in sizes else f"{name} is missing"
    return ""
