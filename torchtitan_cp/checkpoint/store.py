"""Checkpoints of a run on torch.distributed.checkpoint, in `checkpoints/step-N/`.

A checkpoint is written under a temporary name, and renamed when every rank's part and the progress are on
disk; so what bears the final name is complete.
"""

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from torchtitan_cp.config import ConfigError

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d+)")
PARTIAL = ".partial"
PROGRESS_FILE = "progress.json"
FINISHED_MARK = ".metadata"
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)

Parts = Iterable[nn.Module]
Optimizers = Iterable[torch.optim.Optimizer]


@dataclass(frozen=True)
class Progress:
    """Where a run stands, as plain JSON. Learning rates and random numbers follow from the step.

    Attributes:
        step: optimizer steps taken (skipped ones too).
        cursor: tokens trained on, over all ranks; no rank count in it.
        stage: number of the stage at hand; stage_step: its optimizer steps that are taken.
        stage_done: it ended before its last step, as its gate opened.
        source_tokens: of each source's stream, what the stages before this one took.
        identity: what must be the same to go on: the model's shape, the data.
        block_tokens: block of the data order; another one reorders what is still to come.
        short_loss: held-out loss at the curriculum's shortest length when the stage began, where its gate asks.
        consecutive_skips: non-finite steps in a row up to here.
        stage_losses: per stage begun, its first and last training loss, and the steps taken.
    """

    step: int = 0
    cursor: int = 0
    stage: int = 0
    stage_step: int = 0
    stage_done: bool = False
    source_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)
    block_tokens: int = 0
    short_loss: float | None = None
    consecutive_skips: int = 0
    stage_losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds step-N folders; made when needed.
        keep: newest ones kept.
    """

    def __init__(self, folder: str | Path, keep: int) -> None:
        self.folder, self.keep = Path(folder), keep

    def complete(self) -> list[tuple[int, Path]]:
        """(step, folder) of each complete checkpoint, oldest first."""
        found = []
        for path in self.folder.glob("step-*"):
            match = NAME.fullmatch(path.name)
            if match and (path / PROGRESS_FILE).is_file() and (path / FINISHED_MARK).is_file():
                found.append((int(match[1]), path))
        return sorted(found)

    def save(self, progress: Progress, parts: Parts, optimizers: Optimizers) -> Path:
        """Write a checkpoint of this step; all ranks call. Older ones beyond `keep` go afterwards.

        Args:
            parts: this rank's parts of the model, whose parameters bear the names they have in the whole.
            optimizers: of each.
        """
        final = self.folder / f"step-{progress.step}"
        partial = final.with_name(final.name + PARTIAL)
        if dist.get_rank() == 0:
            for stale in (*self.folder.glob(f"*{PARTIAL}"), final):
                shutil.rmtree(stale, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        dcp.save(_state(parts, optimizers), checkpoint_id=partial)
        if dist.get_rank() == 0:
            (partial / PROGRESS_FILE).write_text(json.dumps(dataclasses.asdict(progress), indent=1))
            partial.rename(final)
            for _, path in self.complete()[: -self.keep]:
                shutil.rmtree(path)
        dist.barrier()
        return final

    def read_progress(self) -> tuple[Path, Progress] | None:
        """The newest complete checkpoint whose progress can be read, and where it stood; None if there is none.

        Raises:
            ConfigError: there are some, and none can be read.
        """
        complete = self.complete()
        for _, path in reversed(complete):
            try:
                return path, Progress(**json.loads((path / PROGRESS_FILE).read_text()))
            except (ValueError, TypeError, OSError) as error:
                logger.warning("%s is damaged and passed over: %s: %s", path, PROGRESS_FILE, error)
        if complete:
            raise ConfigError(
                f"no checkpoint in {self.folder} can be read: {PROGRESS_FILE} is damaged in each",
                fix="move the folder away to begin anew, or give the run another job.dump_folder",
            )
        return None

    def load(self, path: Path, parts: Parts, optimizers: Optimizers) -> None:
        """Fill parts and optimizers from a checkpoint written by any number of ranks; all ranks call.

        Raises:
            ConfigError: a part is missing or cannot be read.
        """
        state = _state(parts, optimizers)
        try:
            dcp.load(state, checkpoint_id=path)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise ConfigError(
                f"{path} cannot be loaded: {type(first).__name__}: {first}",
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


def _state(parts: Parts, optimizers: Optimizers) -> dict[str, Any]:
    """Everything by the name it has in the whole model, whatever parts a rank has."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    for part, optimizer in zip(parts, optimizers, strict=True):
        model_state, optimizer_state = get_state_dict(part, optimizer, options=BY_NAME)
        state["model"].update(model_state)
        state["optimizer"].update(optimizer_state)
    return state


def check_identity(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Refuse to go on with another model or other data.

    Raises:
        ConfigError: naming what differs.
    """
    for name, value in now.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{path} was written with {name} {saved.get(name)}, and the config now gives {value}",
                fix="undo the change, or give the new run a folder of its own: --job.dump_folder=...",
            )
