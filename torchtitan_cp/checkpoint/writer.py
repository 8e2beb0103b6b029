"""Writes one checkpoint: aside, with checksums taken on the way to the disk, renamed when all of it is there."""

import dataclasses
import hashlib
import io
import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from torchtitan_cp.checkpoint.manifest import MANIFEST_FILE, PROGRESS_FILE, FileSum, Manifest, wrong_sizes
from torchtitan_cp.checkpoint.progress import Progress

# What a save leaves when it is cut short, and a deletion too; the next save clears it away.
PARTIAL = ".partial"


@dataclass(frozen=True)
class WrittenFiles:
    """What one rank wrote, sent to the rank that finishes the checkpoint."""

    sums: dict[str, FileSum]


class SummingStream(io.RawIOBase):
    """A file opened for writing that keeps the checksum of what goes into it, front to back.

    Attributes:
        failure: what the disk said when it took no more.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.size = file, hashlib.sha256(), 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self.file.write(view)
        except OSError as error:
            self.failure = error
            raise
        self.digest.update(view)
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    def fileno(self) -> int:
        self.file.flush()
        return self.file.fileno()

    @property
    def sum(self) -> FileSum:
        return FileSum(self.size, self.digest.hexdigest())


class SummingFileSystem(FileSystem):
    """torch's file system of checkpoints, which remembers the checksum of every file it wrote.

    Attributes:
        sums: by file name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with Path(path).open("wb") as file:
            summing = SummingStream(file)
            try:
                yield summing
            except RuntimeError:
                # torch.save has only a position for it that it did not expect.
                if summing.failure:
                    raise summing.failure from None
                raise
        self.sums[Path(path).name] = summing.sum

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class CheckpointWriter(FileSystemWriter):
    """torch's writer of one file a rank, into `step-N.partial`, which becomes `step-N` in `finish`.

    Args:
        final: folder that the checkpoint gets.
        progress: written beside the tensors.
        stage_end: whether it is kept as the end of a stage.
    """

    def __init__(self, final: Path, progress: Progress, *, stage_end: bool) -> None:
        super().__init__(final.with_name(final.name + PARTIAL))
        self.final, self.progress, self.stage_end = final, progress, stage_end
        self.fs = self.summing = SummingFileSystem()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # torch's own makes the folder on every rank; here the first rank clears and makes it for all, below.
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank, before any rank writes."""
        clear_leftovers(self.final.parent)
        Path(self.path).mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        results = super().write_data(plan, planner).wait()
        with_sums: Future[list[Any]] = torch.futures.Future()
        with_sums.set_result([*results, WrittenFiles(self.summing.sums)])
        return with_sums

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On the first rank, when every rank has written: progress, manifest, and the final name."""
        sums = {name: entry for rank in results for found in _files(rank) for name, entry in found.sums.items()}
        super().finish(metadata, [[entry for entry in rank if not isinstance(entry, WrittenFiles)] for rank in results])
        folder = Path(self.path)
        self._write_text(PROGRESS_FILE, json.dumps(dataclasses.asdict(self.progress), indent=1))
        manifest = Manifest(self.progress.step, self.stage_end, {**sums, **self.summing.sums})
        self._write_text(MANIFEST_FILE, manifest.to_json())
        wrong = wrong_sizes(folder, manifest)
        if wrong:
            raise OSError(f"what was written is not there: {'; '.join(wrong)}")
        _sync_folder(folder)
        if self.final.exists():
            # Damaged, or the run would have gone on from it.
            discard(self.final)
        folder.rename(self.final)
        _sync_folder(self.final.parent)

    def _write_text(self, name: str, text: str) -> None:
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            stream.write(text.encode())
            os.fsync(stream.fileno())


def _files(results: list[Any]) -> list[WrittenFiles]:
    return [entry for entry in results if isinstance(entry, WrittenFiles)]


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk, not only its files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def discard(folder: Path) -> None:
    """Delete a checkpoint. Its name goes first, so that a deletion cut short leaves no half checkpoint.

    Raises:
        OSError: it cannot be renamed or deleted.
    """
    aside = folder.with_name(f"{folder.name}.old{PARTIAL}")
    folder.rename(aside)
    shutil.rmtree(aside)


def clear_leftovers(folder: Path) -> None:
    """Delete what saves and deletions left when they were cut short."""
    for stale in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(stale, ignore_errors=True)
