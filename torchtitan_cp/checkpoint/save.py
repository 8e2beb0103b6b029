"""Writes one checkpoint under a temporary name, and renames it when all of it is on disk: complete or absent."""

import dataclasses
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan_cp.checkpoint.manifest import MANIFEST_FILE, METADATA_FILE, Checksum, Manifest, checksum, compare_files
from torchtitan_cp.checkpoint.progress import EVALUATED_FILE, PROGRESS_FILE, Progress
from torchtitan_cp.checkpoint.saved_run import list_folder

# Interrupted saves and deletions leave folders with this suffix, which the next save deletes. A folder with REPLACED is
# a whole checkpoint, to be replaced by a newer one of its step.
PARTIAL = ".partial"
REPLACED, EXPIRED = f".replaced{PARTIAL}", f".expired{PARTIAL}"

# Size in bytes and time of the last change, in Unix nanoseconds, of each file of a checkpoint but EVALUATED_FILE.
Stamps = dict[str, tuple[int, int]]


class CheckpointWriter(FileSystemWriter):
    """torch's writer of one file a rank, into `step-N.partial`, which becomes `step-N` in `finish`.

    After that, rank 0 has `written_bytes`, the size of all files, `stamps` of them, and `seconds`, the time since the
    save began.

    Args:
        final: the folder's name when the checkpoint is complete.
        progress: written beside the tensors.
        stage_end: whether the checkpoint ends a stage.
    """

    def __init__(self, final: Path, progress: Progress, *, stage_end: bool) -> None:
        self.partial = final.with_name(final.name + PARTIAL)
        # The state is in host memory already. To copy ahead, torch would use GPU 0, the current device of a new thread:
        # rank 0 would wait for its training, and other ranks of the node would open a CUDA context there.
        super().__init__(self.partial, per_thread_copy_ahead=0)
        self.final, self.progress, self.stage_end, self.started = final, progress, stage_end, time.monotonic()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # torch's method makes the folder on every rank. Here rank 0 makes it, in prepare_global_plan.
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, on rank 0, before any rank writes."""
        delete_partial(self.final.parent)
        self.partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's files, and append their checksums to the results that rank 0 gets."""
        results = super().write_data(plan, planner).wait()
        own = {name: checksum(self.partial / name) for name in {entry.storage_data.relative_path for entry in results}}
        with_checksums: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        with_checksums.set_result([*results, cast(WriteResult, own)])
        return with_checksums

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when every rank has written: write progress and manifest, and give the folder its final name."""
        by_rank = [cast(dict[str, Checksum], rank.pop()) for rank in results]
        files = {name: found for own in by_rank for name, found in own.items()}
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
        # An older checkpoint of this step is damaged, or was saved before the evaluation that follows the step. It is
        # moved aside and deleted last, as the deletion takes time in which a job may be killed.
        replaced = self.final.exists() and self.final.rename(f"{self.final}{REPLACED}")
        self.partial.rename(self.final)
        for folder in self.final.parents[:2]:  # `checkpoints`, and the run's folder, where it may be new
            sync(folder)
        self.stamps, self.seconds = file_stamps(self.final), time.monotonic() - self.started
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)  # the next save tries again


def write_evaluated(folder: Path, progress: Progress) -> None:
    """Write the progress after an evaluation beside the checkpoint of its step, if that was written: whole or not.

    Raises:
        OSError: it cannot be written.
    """
    if folder.is_dir():
        partial = folder / f"{EVALUATED_FILE}{PARTIAL}"
        partial.write_text(json.dumps(dataclasses.asdict(progress), indent=1), encoding="utf-8")
        sync(partial)
        partial.rename(folder / EVALUATED_FILE)
        sync(folder)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
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


def file_stamps(folder: Path) -> Stamps:
    """The sizes and times of a checkpoint's files; none if they cannot be read."""
    with suppress(OSError):
        files = [entry for entry in list_folder(folder) if not entry.name.startswith(EVALUATED_FILE)]
        return {entry.name: (entry.stat().st_size, entry.stat().st_mtime_ns) for entry in files}
    return {}


def restore_replaced(folder: Path) -> None:
    """Give checkpoints that were to be replaced their names back, if the new ones are not there."""
    names = {entry.name for entry in list_folder(folder)}
    for name in names:
        if name.endswith(REPLACED) and (final := name.removesuffix(REPLACED)) not in names:
            (folder / name).rename(folder / final)


def delete_partial(folder: Path) -> None:
    """Delete what interrupted saves and deletions left."""
    restore_replaced(folder)
    for entry in list_folder(folder):
        if entry.name.endswith(PARTIAL) and entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.endswith(PARTIAL):
            os.unlink(entry)
