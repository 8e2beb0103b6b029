"""The list of a checkpoint's files with size and checksum, by which a damaged one is told from a whole one."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MANIFEST_FILE = "manifest.json"
PROGRESS_FILE = "progress.json"
METADATA_FILE = ".metadata"
ALWAYS_THERE = {METADATA_FILE, PROGRESS_FILE}
READ_BYTES = 2**24


class DamagedError(Exception):
    """A checkpoint's manifest is missing or makes no sense."""


@dataclass(frozen=True)
class FileSum:
    """What a file must be.

    Attributes:
        bytes: its size.
        sha256: of its content, in hexadecimal.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: optimizer steps taken when it was saved.
        stage_end: whether a stage of the curriculum ended there; such a checkpoint stays for good.
        files: by name, every file but the manifest itself.
    """

    step: int
    stage_end: bool
    files: dict[str, FileSum]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DamagedError: it is missing, cannot be read, or lists other than files of this folder.
    """
    try:
        raw = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        files = {str(name): FileSum(int(entry["bytes"]), str(entry["sha256"])) for name, entry in raw["files"].items()}
        manifest = Manifest(int(raw["step"]), bool(raw["stage_end"]), files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})") from None
    strange = [name for name in files if Path(name).name != name]
    if strange or not files.keys() >= ALWAYS_THERE:
        raise DamagedError(f"{MANIFEST_FILE} is no list of a checkpoint's files")
    return manifest


def sum_file(path: Path) -> FileSum:
    """Read a file from beginning to end.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileSum(size, digest.hexdigest())


def wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    """A line for each file that is missing or has another size; nothing is read."""
    return [line for name, wanted in manifest.files.items() for line in _wrong_size(folder / name, wanted)]


def wrong_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """A line for each of these files that is missing or is not what was written. Reads them whole."""
    found = []
    for name in names:
        path, wanted = folder / name, manifest.files[name]
        lines = _wrong_size(path, wanted)
        try:
            if not lines and sum_file(path) != wanted:
                lines = [f"{name} has another checksum than when it was written"]
        except OSError as error:
            lines = [f"{name} cannot be read ({error.strerror})"]
        found += lines
    return found


def _wrong_size(path: Path, wanted: FileSum) -> list[str]:
    try:
        size = path.stat().st_size
    except OSError as error:
        return [f"{path.name} cannot be read ({error.strerror})"]
    return [] if size == wanted.bytes else [f"{path.name} has {size:,} bytes and had {wanted.bytes:,}"]
