"""Writes one checkpoint under a temporary name, and renames it when all of it is on disk: complete or absent."""

import dataclasses
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torchtitan_cp.checkpoint.manifest import MANIFEST_FILE, METADATA_FILE, Checksum, Manifest, checksum, compare_files
from torchtitan_cp.checkpoint.progress import PROGRESS_FILE, Progress

# Saves and deletions that were cut short leave folders with this suffix; the next save deletes them. One that a newer
# checkpoint of its step replaces is still whole.
PARTIAL = ".partial"
REPLACED, EXPIRED = f".replaced{PARTIAL}", f".expired{PARTIAL}"


class CheckpointWriter(FileSystemWriter):
    """torch's writer of one file a rank, into `step-N.partial`, which becomes `step-N` in `finish`.

    On the first rank `written_bytes` then is what the manifest's files have, and `seconds` how long it took.

    Args:
        final: folder that the checkpoint gets.
        progress: written beside the tensors.
        stage_end: whether the checkpoint ends a stage.
    """

    def __init__(self, final: Path, progress: Progress, *, stage_end: bool) -> None:
        self.partial = final.with_name(final.name + PARTIAL)
        # Nothing is left to copy from a GPU. To copy ahead, torch would wait for work on GPU 0, where threads begin:
        # on rank 0 for training's, again and again, and on other ranks of the node by a CUDA context of each.
        super().__init__(self.partial, per_thread_copy_ahead=0)
        self.final, self.progress, self.stage_end, self.started = final, progress, stage_end, time.monotonic()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # torch makes the folder on every rank; here the first rank clears and makes it for all, below.
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank, before any rank writes."""
        delete_partial(self.final.parent)
        self.partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[Any]]:
        """Write this rank's files, and append their checksums to the results that the first rank gets."""
        results: list[Any] = super().write_data(plan, planner).wait()
        own = {name: checksum(self.partial / name) for name in {entry.storage_data.relative_path for entry in results}}
        with_checksums: torch.futures.Future[list[Any]] = torch.futures.Future()
        with_checksums.set_result([*results, own])
        return with_checksums

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On the first rank, when every rank has written: progress, manifest, and the final name."""
        files: dict[str, Checksum] = {name: found for rank in results for name, found in rank.pop().items()}
        super().finish(metadata, results)
        progress_file, manifest_file = self.partial / PROGRESS_FILE, self.partial / MANIFEST_FILE
        progress_file.write_text(json.dumps(dataclasses.asdict(self.progress), indent=1), encoding="utf-8")
        files |= {name: checksum(self.partial / name) for name in (METADATA_FILE, PROGRESS_FILE)}
        self.written_bytes = sum(entry["bytes"] for entry in files.values())
        manifest = Manifest(self.progress.step, self.stage_end, files)
        manifest_file.write_text(json.dumps(dataclasses.asdict(manifest), indent=1), encoding="utf-8")
        if damage := compare_files(self.partial, manifest, files, content=False):
            raise OSError(f"rank 0 cannot see files that other ranks wrote: {'; '.join(damage)}")
        for path in (progress_file, manifest_file, self.partial):
            sync(path)
        # A folder of the same step is damaged, or from before the evaluation after it. It is moved aside, and deleted
        # last, as that takes time in which a job may be killed.
        replaced = self.final.exists() and self.final.rename(f"{self.final}{REPLACED}")
        self.partial.rename(self.final)
        for folder in self.final.parents[:2]:  # `checkpoints` may be new in the run's folder
            sync(folder)
        self.seconds = time.monotonic() - self.started
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)  # the next save tries again


def sync(path: Path) -> None:
    """Flush a file to disk, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete_checkpoint(folder: Path) -> None:
    """Rename a checkpoint and delete it, so that a deletion cut short leaves no half checkpoint.

    Raises:
        OSError: it cannot be renamed or deleted.
    """
    shutil.rmtree(folder.rename(f"{folder}{EXPIRED}"))


def list_folder(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds; nothing if it is not there.

    Raises:
        OSError: it cannot be read. To pathlib's glob and is_dir that is an empty folder, and none.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return list(entries)
    return []


def restore_replaced(folder: Path) -> None:
    """Give checkpoints their names back that were to be replaced by others which have not come."""
    names = {entry.name for entry in list_folder(folder)}
    for name in names:
        if name.endswith(REPLACED) and (final := name.removesuffix(REPLACED)) not in names:
            (folder / name).rename(folder / final)


def delete_partial(folder: Path) -> None:
    """Delete what saves and deletions left when they were cut short."""
    restore_replaced(folder)
    for entry in list_folder(folder):
        if entry.name.endswith(PARTIAL) and entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.endswith(PARTIAL):
            os.unlink(entry)
