"""Checkpoints of a run on torch.distributed.checkpoint, in `checkpoints/step-N/`.

A save copies the state to host memory while training stands still, and writes it from a thread while training goes
on. It is written under a temporary name, and renamed when every rank's part, the progress and the manifest are on
disk; so what bears the final name is complete, and what was there before is never touched.
"""

import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.tensor import DTensor

from torchtitan_cp.checkpoint.manifest import PROGRESS_FILE, DamagedError, read_manifest, wrong_files
from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.checkpoint.reader import CheckpointPlanner, CheckpointReader, read_table
from torchtitan_cp.checkpoint.writer import CheckpointWriter, clear_leftovers, discard
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.sections import Checkpoint

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d+)")
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)

Parts = Iterable[nn.Module]
Optimizers = Iterable[torch.optim.Optimizer]


class Stager(DefaultStager):
    """torch's, which up to 2.11 forgets after each copy how to make another and the host memory it has."""

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        copied = self._state_dict_stager.stage(state_dict, non_blocking=self._config.use_non_blocking_copy)
        if self._config.use_non_blocking_copy:
            torch.accelerator.synchronize()
        return copied


@dataclass(frozen=True)
class Saving:
    """A save under way.

    Attributes:
        writer: what writes it.
        done: the thread's outcome.
        begun: time.monotonic() when training stopped for it.
        waited_seconds: for the save before it; staging_seconds: for the copy to host memory. Training stood still
            for their sum.
    """

    writer: CheckpointWriter
    done: Future[Any]
    begun: float
    waited_seconds: float
    staging_seconds: float


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        folder: holds step-N folders; made when needed.
        settings: [checkpoint].

    Attributes:
        newest_step: of the newest checkpoint that was written or loaded here; None before either.
    """

    def __init__(self, folder: str | Path, settings: Checkpoint | None = None) -> None:
        self.folder, self.settings = Path(folder), settings or Checkpoint()
        self.newest_step: int | None = None
        self._saving: Saving | None = None
        self._stager: Stager | None = None
        self._save_group: dist.ProcessGroup | None = None

    def complete(self) -> list[tuple[int, Path]]:
        """(step, folder) of each checkpoint that has its final name, oldest first; their files are not looked into."""
        found = []
        for path in self.folder.glob("step-*"):
            match = NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
        return sorted(found)

    def stage_ends(self) -> list[Path]:
        """Complete ones that end a stage, oldest first."""
        return [path for _, path in self.complete() if _is_stage_end(path)]

    # Saving --------------------------------------------------------------------------------------------------

    def save(self, progress: Progress, parts: Parts, optimizers: Optimizers, *, stage_end: bool = False) -> None:
        """Begin a checkpoint of this step; all ranks call. What went wrong is logged and harms nothing.

        Args:
            parts: this rank's parts of the model, whose parameters bear the names they have in the whole.
            optimizers: of each.
            stage_end: keep it for good.
        """
        begun = time.monotonic()
        self.wait()
        if self._save_group is None:
            self._open()
        waited = time.monotonic() - begun
        writer = CheckpointWriter(self.folder / f"step-{progress.step}", progress, stage_end=stage_end)
        done = self._begin(_state(parts, optimizers), writer)
        self._saving = Saving(writer, done, begun, waited, time.monotonic() - begun - waited)
        if not self.settings.asynchronous:
            self.wait()

    def _begin(self, state: dict[str, Any], writer: CheckpointWriter) -> Future[Any]:
        """Copy the state and have a thread write it; what cannot be copied is written at once."""
        group = self._save_group
        if _can_be_staged(state):
            answer = dcp.async_save(state, storage_writer=writer, process_group=group, async_stager=self._stager)
            return answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
        done: Future[Any] = Future()
        try:
            done.set_result(dcp.save(state, storage_writer=writer, process_group=group))
        except (Exception, CheckpointException) as error:
            done.set_exception(error)
        return done

    def _open(self) -> None:
        """Host memory and a group of the thread's own, whose collectives run beside those of training."""
        on_gpu = torch.accelerator.is_available()
        self._stager = Stager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
        timeout = timedelta(seconds=self.settings.timeout_seconds)
        self._save_group = dist.new_group(backend="gloo", timeout=timeout)

    def poll(self) -> None:
        """Report a save that has ended since."""
        if self._saving and self._saving.done.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way has ended, and report it."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        step = saving.writer.progress.step
        try:
            saving.done.result()
        except CheckpointException as error:
            rank, (reason, _) = next(iter(error.failures.items()))
            self._complain(step, f"rank {rank}: {_told(reason)}")
        except Exception as error:
            # A rank that is gone, or the save's own timeout: training meets the first by itself.
            self._complain(step, f"rank {dist.get_rank()} on {socket.gethostname()}: {_told(error)}")
        else:
            self.newest_step = step
            self._report(saving)

    def _report(self, saving: Saving) -> None:
        """Say what it cost, and delete what is kept no longer. On the first rank."""
        if dist.get_rank() != 0:
            return
        size = sum(file.stat().st_size for file in saving.writer.final.iterdir())
        before = f" and {saving.waited_seconds:.2f} s for the save before" if saving.waited_seconds > 0.01 else ""
        logger.info(
            "%s: training stood still %.2f s to copy it%s; %s bytes were on disk after %.1f s",
            saving.writer.final,
            saving.staging_seconds,
            before,
            f"{size:,}",
            time.monotonic() - saving.begun,
        )
        for path in self._kept_no_longer():
            try:
                discard(path)
            except OSError as error:
                logger.warning("%s is kept no longer and cannot be deleted: %s", path, error)

    def _complain(self, step: int, reason: str) -> None:
        """Name what went wrong. On the first rank, which clears away what was written of it."""
        if dist.get_rank() != 0:
            return
        clear_leftovers(self.folder)
        last = f"step-{self.newest_step}" if self.newest_step is not None else "none, the run would begin anew"
        logger.error(
            "NO CHECKPOINT of step %d was written to %s: %s. Training goes on, and the next interval tries again. "
            "The last good one is %s.\n  fix: make room there and see that the folder exists and may be written",
            step,
            self.folder,
            reason,
            last,
        )

    def _kept_no_longer(self) -> list[Path]:
        """All but the newest `keep`, multiples of `keep_every_steps`, ends of stages, and those of later steps.

        Those are damaged ones, which a run has gone on from before, and do not count among the newest.
        """
        every = self.settings.keep_every_steps
        older = [found for found in self.complete() if found[0] <= (self.newest_step or 0)][: -self.settings.keep]
        return [path for step, path in older if not (every and step % every == 0) and not _is_stage_end(path)]

    def close(self) -> None:
        """Wait for the save under way and give its memory and group back; all ranks call."""
        self.wait()
        if self._stager and self._save_group:
            self._stager.close()
            dist.destroy_process_group(self._save_group)
            self._stager = self._save_group = None

    # Loading -------------------------------------------------------------------------------------------------

    def read_progress(
        self, before: int | None = None, wanted: Callable[[Progress], bool] | None = None
    ) -> tuple[Path, Progress] | None:
        """The newest checkpoint whose files are what was written, and where it stood; None if there is none.

        All ranks call, and each reads a share of the files. Damaged ones are named in the log and passed over.

        Args:
            before: only those of steps before this one.
            wanted: only those that stood so.

        Raises:
            ConfigError: there are some, and all are damaged.
        """
        names = _from_first([path.name for step, path in self.complete() if before is None or step < before])
        undamaged = False
        for name in reversed(names):
            path = self.folder / name
            wrong = _gathered(_damage(path))
            if not wrong:
                undamaged, progress = True, _from_first(_read_progress(path))
                if wanted is None or wanted(progress):
                    return path, progress
            elif _rank() == 0:
                logger.warning("%s is damaged and passed over: %s", path, "; ".join(wrong))
        if names and not undamaged:
            raise ConfigError(
                f"no checkpoint in {self.folder} can be read: {', '.join(names)} are damaged",
                fix="move the folder away to begin anew, or give the run another job.dump_folder",
            )
        return None

    def load(self, path: Path, parts: Parts, optimizers: Optimizers) -> None:
        """Fill parts and optimizers from a checkpoint written by any number of ranks; all ranks call.

        Raises:
            ConfigError: a part is missing or cannot be read.
        """
        state = _state(parts, optimizers)
        reader = CheckpointReader(path, read_table(path, read_manifest(path)))
        try:
            dcp.load(state, storage_reader=reader, planner=CheckpointPlanner())
        except CheckpointException as error:
            raise ConfigError(
                f"{path} cannot be loaded: {first_failure(error)}",
                fix=f"delete {path} to resume from the checkpoint before it",
            ) from None
        for part, optimizer in zip(parts, optimizers, strict=True):
            # Of one part, of which only the names are asked for.
            own = _state([part], [optimizer])
            values = {kind: {name: state[kind][name] for name in own[kind]} for kind in own}
            set_state_dict(
                part,
                optimizer,
                model_state_dict=values["model"],
                optim_state_dict=values["optimizer"],
                options=BY_NAME,
            )
        self.newest_step = int(path.name.removeprefix("step-"))


def _state(parts: Parts, optimizers: Optimizers) -> dict[str, Any]:
    """Everything by the name it has in the whole model, whatever parts a rank has."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    for part, optimizer in zip(parts, optimizers, strict=True):
        model_state, optimizer_state = get_state_dict(part, optimizer, options=BY_NAME)
        state["model"].update(model_state)
        state["optimizer"].update(optimizer_state)
    return state


def _can_be_staged(state: dict[str, Any]) -> bool:
    """Whether torch's stager knows these tensors; torchao's moments in 8 bits it does not."""
    tensors = [value for kind in state.values() for value in kind.values() if isinstance(value, torch.Tensor)]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in tensors]
    return all(type(value) in (torch.Tensor, nn.Parameter) for value in local)


def _read_progress(path: Path) -> Progress:
    """Where a checkpoint's run stood.

    Raises:
        DamagedError: that cannot be read.
    """
    try:
        return Progress.from_json(json.loads((path / PROGRESS_FILE).read_text(encoding="utf-8")))
    except TypeError as error:
        raise DamagedError(f"{PROGRESS_FILE} was written by another version of this program: {error}") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{PROGRESS_FILE} cannot be read ({type(error).__name__}: {error})") from None


def _damage(path: Path) -> list[str]:
    """What is wrong with this rank's share of a checkpoint's files, a line each."""
    try:
        manifest = read_manifest(path)
        _read_progress(path)
    except DamagedError as error:
        return [str(error)]
    names = sorted(manifest.files)[_rank() :: dist.get_world_size() if dist.is_initialized() else 1]
    return wrong_files(path, manifest, names)


def _is_stage_end(path: Path) -> bool:
    try:
        return read_manifest(path).stage_end
    except DamagedError:
        # Passed over at load, with its name; what can still be saved of it is for a person to say.
        return True


def first_failure(error: CheckpointException) -> str:
    """What the first of its ranks met."""
    return _told(next(iter(error.failures.values()))[0])


def _told(error: BaseException) -> str:
    """An error's kind and its first line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _rank() -> int:
    """This process's number; 0 where there are no ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def _from_first(value: Any) -> Any:
    """What the first rank has, on every rank: their views of a shared folder may differ for a while."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def _gathered(lines: list[str]) -> list[str]:
    """The lines of all ranks, each once."""
    every: list[Any] = [lines]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, lines)
    return list(dict.fromkeys(line for rank in every for line in rank))
