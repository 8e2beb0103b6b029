"""The manifest of a checkpoint lists its files with size and checksum; `verify_checkpoint` compares them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch.distributed as dist

from torchtitan_cp.checkpoint.progress import PROGRESS_FILE, DamagedError, read_progress

MANIFEST_FILE = "manifest.json"
METADATA_FILE = ".metadata"
READ_BYTES = 2**24


class Checksum(TypedDict):
    """Size in bytes and SHA-256 of a file, and when it was last changed, in Unix nanoseconds."""

    bytes: int
    sha256: str
    modified_ns: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: optimizer steps begun when it was saved.
        stage_end: whether it ends a stage of the curriculum; such a checkpoint is never deleted.
        files: checksums by name, of every file but the manifest itself.
    """

    step: int
    stage_end: bool
    files: dict[str, Checksum]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DamagedError: it is missing, cannot be read, or does not list files of this folder.
    """
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))
        plain = all(Path(name).name == name and entry["bytes"] >= 0 for name, entry in manifest.files.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})") from None
    if not plain or not manifest.files.keys() >= {METADATA_FILE, PROGRESS_FILE}:
        raise DamagedError(f"{MANIFEST_FILE} is not a list of a checkpoint's files")
    return manifest


def verify_checkpoint(folder: Path, *, collective: bool = False) -> list[str]:
    """Verify a checkpoint: every file must have the size and the SHA-256 that its manifest lists.

    Args:
        folder: a step-N folder.
        collective: all ranks call, each reads its share of the files, and all get the same answer.

    Returns:
        A line for each damaged file; empty if the checkpoint is intact.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if collective else (0, 1)
    try:
        manifest = read_manifest(folder)
        read_progress(folder)
        damage = compare_files(folder, manifest, sorted(manifest.files)[rank::ranks])
    except DamagedError as error:
        damage = [str(error)]
    by_rank = [damage] * ranks
    if collective:
        dist.all_gather_object(by_rank, damage)
    return list(dict.fromkeys(line for lines in by_rank for line in lines))


def compare_files(folder: Path, manifest: Manifest, names: Iterable[str], *, content: bool = True) -> list[str]:
    """A line for each of these files that is missing or differs from the manifest.

    Args:
        content: read the files and compare their checksums; otherwise compare sizes only.
    """
    damage = []
    for name in names:
        path, expected = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                damage.append(f"{name} has {size:,} bytes and had {expected['bytes']:,}")
            elif content and checksum(path)["sha256"] != expected["sha256"]:
                damage.append(f"{name} has another checksum than when it was written")
        except OSError as error:
            damage.append(f"{name} cannot be read ({error.strerror})")
    return damage


def checksum(path: Path) -> Checksum:
    """The size and SHA-256 of a file, and the time of its last change before it was read.

    Raises:
        OSError: it cannot be read.
    """
    digest, size, modified_ns = hashlib.sha256(), 0, path.stat().st_mtime_ns
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest(), "modified_ns": modified_ns}
