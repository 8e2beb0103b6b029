"""Checkpoints of a run on torch.distributed.checkpoint, in `checkpoints/step-N/`.

A save copies the state to host memory while training stands still, and a thread writes it while training goes on.
It is written under a temporary name, and renamed when every rank's files, the progress and the manifest are on disk.
So a folder named step-N is complete. An older checkpoint of the same step is moved aside first, and back if the new one
cannot be renamed.
"""

import logging
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, planner_helpers
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from torchtitan_cp.attention.local_shard import find_shard, local_tensor
from torchtitan_cp.checkpoint.base import frozen_names
from torchtitan_cp.checkpoint.load import CheckpointReader, describe_failure, load_state
from torchtitan_cp.checkpoint.manifest import verify_checkpoint
from torchtitan_cp.checkpoint.progress import Progress, read_progress
from torchtitan_cp.checkpoint.retention import Retention, is_stage_end
from torchtitan_cp.checkpoint.save import (
    CheckpointWriter,
    delete_checkpoint,
    delete_partial,
    file_stamps,
    write_evaluated,
)
from torchtitan_cp.checkpoint.saved_run import complete_checkpoints
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.names import format_bytes
from torchtitan_cp.config.run import Checkpoint

logger = logging.getLogger(__name__)

FULL_BYTES = 1 << 20  # free on a disk that was filled by a save
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)

Parts = Iterable[nn.Module]
Optimizers = Iterable[torch.optim.Optimizer]


def _size_and_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and offsets of this rank's shard, per dim. An empty shard lies behind all others, as in torch."""
    slices = find_shard(shape, mesh, placements)
    offsets = (one.start if one.stop > one.start else size for one, size in zip(slices, shape, strict=True))
    return tuple(one.stop - one.start for one in slices), tuple(offsets)


# torch's own function is wrong where FSDP shards a dim that tensor parallelism divides unevenly, such as a vocabulary.
planner_helpers.compute_local_shape_and_global_offset = _size_and_offset  # type: ignore[assignment]


class PendingSave(NamedTuple):
    """A save that is being written.

    Attributes:
        writer: what writes it.
        written: the thread's outcome.
        paused: for how long training stood still, and for what.
    """

    writer: CheckpointWriter
    written: Future[object]
    paused: str


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        folder: holds step-N folders; made when needed.
        settings: how many checkpoints are kept, and whether a save runs beside training.

    Attributes:
        newest_step: of the newest checkpoint that was written or loaded here; None before either.
        lost_contact: the ranks lost each other in the last save, so that its process group can no longer be used.
    """

    def __init__(self, folder: str | Path, settings: Checkpoint | None = None) -> None:
        self.folder, self.settings = Path(folder), settings or Checkpoint()
        self.newest_step: int | None = None
        self.lost_contact, self._waited = False, 0.0  # seconds, for saves before the next
        self._pending: PendingSave | None = None
        self._retention = Retention(self.settings)
        # From `connect` on: host memory, a thread, and a process group apart from training's.
        self._background: tuple[StateDictStager, ThreadPoolExecutor, dist.ProcessGroup] | None = None
        self.restart_interval()

    def complete(self) -> list[tuple[int, Path]]:
        """(step, folder) of each checkpoint that has its final name, oldest first; their files are not verified.

        Raises:
            OSError: the folder cannot be read.
        """
        return complete_checkpoints(self.folder)

    def stage_ends(self) -> list[Path]:
        """Complete checkpoints that end a stage, oldest first."""
        return [path for _, path in self.complete() if is_stage_end(path)]

    # When a checkpoint is due, apart from the ends of stages --------------------------------------------------

    def restart_interval(self) -> None:
        """Count interval_minutes from now: training begins, or a save is due."""
        self._interval_start = time.monotonic()

    def time_is_up(self) -> bool:
        """Whether interval_minutes have passed on this rank's clock. Clocks differ: ranks must agree before a save."""
        minutes = self.settings.interval_minutes
        return minutes > 0 and time.monotonic() - self._interval_start >= 60 * minutes

    # Saving --------------------------------------------------------------------------------------------------

    def connect(self) -> tuple[StateDictStager, ThreadPoolExecutor, dist.ProcessGroup]:
        """Make what saves need, unless it exists. Collective. On GPUs the first use of gloo, which may fail."""
        if self._background is None:
            stager = StateDictStager(pin_memory=torch.accelerator.is_available())
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.settings.timeout_seconds))
            self._background = stager, ThreadPoolExecutor(1), group
        return self._background

    def save(self, progress: Progress, parts: Parts, optimizers: Optimizers, *, stage_end: bool = False) -> None:
        """Start a checkpoint of this step; all ranks call. A failure is logged, and training goes on.

        Args:
            parts: this rank's parts of the model, whose parameters have the names they have in the whole model.
            optimizers: one for each part.
            stage_end: the checkpoint ends a stage, and is never deleted.
        """
        on_gpu = torch.accelerator.is_available()
        self.wait()
        waited, self._waited = self._waited, 0.0
        writer = CheckpointWriter(self.folder / f"step-{progress.step}", progress, stage_end=stage_end)
        stager, thread, group = self.connect()
        state = _state(parts, optimizers)
        can_be_copied = _can_be_copied(state)
        if can_be_copied:
            state = stager.stage(state, non_blocking=on_gpu)
            if on_gpu:
                torch.accelerator.synchronize()
        written = thread.submit(dcp.save, state, storage_writer=writer, process_group=group)
        if not can_be_copied:
            written.exception()  # waits
        paused = f"{time.monotonic() - writer.started:.2f} s for the copy"
        if waited > 0.01:
            paused += f" and {waited:.2f} s for the save before"
        self._pending = PendingSave(writer, written, paused)
        if not self.settings.asynchronous:
            self.wait()

    def save_evaluation(self, progress: Progress) -> None:
        """Write the progress after the evaluation of the last save's step beside that, when it is on disk."""

        def write() -> None:
            try:
                write_evaluated(self.folder / f"step-{progress.step}", progress)
            except OSError as error:
                logger.warning("%s: the evaluation of step %d is not saved: %s", self.folder, progress.step, error)

        if self._background and dist.get_rank() == 0:
            self._background[1].submit(write)  # behind the save

    def poll(self) -> None:
        """Report the pending save if it has ended."""
        if self._pending and self._pending.written.done():
            self.wait()

    def wait(self, *, last: bool = False) -> None:
        """Wait until the pending save has ended, and report it. `last`: no other save follows."""
        if self._pending is None:
            return
        (writer, written, paused), self._pending = self._pending, None
        step, began = writer.progress.step, time.monotonic()
        # From the disk, a lost rank (which training notices by itself), or the save's own timeout.
        error = written.exception()
        self._waited += time.monotonic() - began
        self.lost_contact = bool(error) and not isinstance(error, CheckpointException)
        if not error:
            self.newest_step = step
        if dist.get_rank() != 0:
            return
        assert self._background
        thread = self._background[1]  # deletes too, which may take longer than a step's time limit
        if error:
            self._report_failure(writer, describe_failure(error), last)
            thread.submit(delete_partial, self.folder)
            return
        folder, size, seconds = writer.final, writer.written_bytes, writer.seconds
        self._retention.record(folder, writer.stamps, intact=True)
        logger.info(f"{folder}: training paused {paused}; {format_bytes(size)} were on disk after {seconds:.1f} s")
        # The checkpoints before a rollback stay until a healthy step: the next rollback may have to go back further.
        if writer.progress.healthy_since_rollback:
            thread.submit(self._delete_expired)

    def _report_failure(self, writer: CheckpointWriter, reason: str, last_save: bool) -> None:
        """Log what went wrong."""
        with suppress(OSError):  # the disk may be what went wrong
            if shutil.disk_usage(self.folder).free < FULL_BYTES:  # of which torch's writer says nothing
                reason = f"No space left on device ({reason})"
        last = f"The last good one is step-{self.newest_step}"
        last = last if self.newest_step is not None else "There is no good one yet, so the run would start over"
        lost = "; if that is of a later step, the end of this stage is not kept, nor exported" * writer.stage_end
        again = f" The next save tries again{lost}." * (not last_save)
        logger.error(
            f"NO CHECKPOINT of step {writer.progress.step} was written to {self.folder}: {reason}.{again} {last}."
            f"\n  fix: free space there, and check that the folder exists and can be written"
        )

    def _delete_expired(self) -> None:
        """Delete what retention lets go, except checkpoints of later steps.

        Those are damaged, or were left behind by a rollback: the run went on from one before them.
        """
        found = list[tuple[int, Path]]()
        with suppress(OSError):
            found = [(step, path) for step, path in self.complete() if step <= (self.newest_step or 0)]
        for path in self._retention.expired(found):
            try:
                delete_checkpoint(path)
            except OSError as error:
                logger.warning("%s has expired and cannot be deleted: %s", path, error)

    def close(self) -> None:
        """Wait for the pending save and free its memory, thread and group; all ranks call."""
        self.wait(last=True)
        if self._background:
            _, thread, group = self._background
            thread.shutdown()
            dist.destroy_process_group(group)
            self._background, self.lost_contact = None, False

    # Loading -------------------------------------------------------------------------------------------------

    def find_newest(self, before: int | None = None, *, healthy: bool = False) -> tuple[Path, Progress] | None:
        """The newest intact checkpoint, and where its run stood; None if there is none.

        All ranks call, and each reads a share of the files. The log names damaged checkpoints, which are skipped.

        Args:
            before: only checkpoints of steps before this one.
            healthy: only checkpoints that recovery may go back to.

        Raises:
            ConfigError: there are checkpoints, and all are damaged. Not with `before`, which leaves some out.
        """
        intact = False
        if self._background:
            self._background[1].submit(int).result()  # the thread has ended the deletions before this empty task
        # Views of a shared folder may differ for a while: all ranks go by the first one's.
        listed = self.complete() if dist.get_rank() == 0 else []
        names = [[path.name for step, path in listed if before is None or step < before]]
        dist.broadcast_object_list(names)
        for name in reversed(names[0]):
            path = self.folder / name
            stamps = file_stamps(path)
            # A second time, as a network file system may fail once.
            damage = verify_checkpoint(path, collective=True) and verify_checkpoint(path, collective=True)
            self._retention.record(path, stamps, intact=not damage)
            if not damage:
                # Of all ranks: a network file system may show EVALUATED_FILE to some of them later.
                intact, progress = True, [read_progress(path)]
                dist.broadcast_object_list(progress)
                if progress[0].healthy or not healthy:
                    return path, progress[0]
            elif dist.get_rank() == 0:
                logger.warning("%s is damaged and skipped: %s", path, "; ".join(damage))
        if names[0] and not intact and before is None:
            raise ConfigError(
                f"no checkpoint in {self.folder} can be read: {', '.join(names[0])} are damaged",
                fix="move the folder away to start over, or give the run another job.dump_folder",
            )
        return None

    def load(self, path: Path, parts: Parts, optimizers: Optimizers) -> None:
        """Fill parts and optimizers in place from a checkpoint written by any number of ranks; all ranks call.

        The optimizers keep their settings, as the config may give others now.

        Raises:
            ConfigError: a part is missing or cannot be read.
        """
        reader, state = CheckpointReader(path), _state(parts, optimizers)
        # A parameter that never had a gradient (of an image encoder, when training on text) has no stored moments.
        stored = {name.rpartition(".")[0] for name in reader.table.state_dict_metadata}
        state["optimizer"] = {
            name: value
            for name, value in state["optimizer"].items()
            if not name.startswith("state.") or f"optimizer.{name}".rpartition(".")[0] in stored
        }
        load_state(reader, state)
        self.newest_step = int(path.name.removeprefix("step-"))


def _state(parts: Parts, optimizers: Optimizers) -> STATE_DICT_TYPE:
    """The tensors themselves, not copies, by the names they have in the whole model, without frozen weights."""
    state: STATE_DICT_TYPE = {"model": {}, "optimizer": {}}
    for part, optimizer in zip(parts, optimizers, strict=True):
        fresh = not optimizer.state
        model_state, optimizer_state = get_state_dict(part, optimizer, options=BY_NAME)
        if fresh:  # get_state_dict made moments by a step without gradients, which must not count
            for moments in optimizer.state.values():
                if "step" in moments:
                    moments["step"].zero_()
        frozen = frozen_names(part)
        state["model"].update({name: x for name, x in model_state.items() if name not in frozen})
        state["optimizer"].update(optimizer_state)
    return state


def _can_be_copied(state: STATE_DICT_TYPE) -> bool:
    """Whether torch's stager can copy these tensors; it does not know torchao's 8-bit moments."""
    tensors = [value for kind in state.values() for value in kind.values() if isinstance(value, torch.Tensor)]
    return all(type(local_tensor(tensor)) in (torch.Tensor, nn.Parameter) for tensor in tensors)
