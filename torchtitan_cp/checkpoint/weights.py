"""Reads the model of a checkpoint, for export, generation, evaluation and runs that start from it."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_cp.checkpoint.base import frozen_names
from torchtitan_cp.checkpoint.load import CheckpointReader, load_state
from torchtitan_cp.checkpoint.manifest import verify_checkpoint
from torchtitan_cp.checkpoint.saved_run import SavedRun, read_saved_run
from torchtitan_cp.config import ConfigError

PREFIX = "model."


@dataclass(frozen=True)
class SavedModel(SavedRun):
    """A checkpoint's model.

    Attributes:
        tensors: name -> (size, dtype) of each parameter.
        reader: of the checkpoint's files.
    """

    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    reader: CheckpointReader

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Read whole parameters to the host.

        Raises:
            ConfigError: a file cannot be read; the run may have deleted the checkpoint since it was opened.
        """
        values = {name: torch.empty(self.tensors[name][0], dtype=self.tensors[name][1]) for name in names}
        with warnings.catch_warnings():
            # torch warns that only this process reads, which is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_state(self.reader, {"model": values}, no_dist=True)
        return values


def open_saved_model(path: Path, *, collective: bool = False) -> SavedModel:
    """Verify a checkpoint and read all of it but the tensors.

    Args:
        path: as of `read_saved_run`.
        collective: all ranks call, and share the work of verifying.

    Raises:
        ConfigError: as `read_saved_run`, or the checkpoint is damaged.
    """
    run = read_saved_run(path)
    if damage := verify_checkpoint(run.path, collective=collective):
        raise ConfigError(f"{run.path} is damaged: {'; '.join(damage)}", fix="use another checkpoint of the run")
    reader = CheckpointReader(run.path)
    tensors = {
        name.removeprefix(PREFIX): (entry.size, entry.properties.dtype)
        for name, entry in reader.table.state_dict_metadata.items()
        if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    return SavedModel(run.path, run.config, run.stage_index, run.progress, tensors, reader)


def load_weights(saved: SavedModel, parts: Iterable[nn.Module]) -> None:
    """Fill the parts of a model but for frozen weights, sharded in any way; each rank reads its own shards. Collective.

    Raises:
        ConfigError: as `SavedModel.read`.
    """
    for part in parts:
        frozen = frozen_names(part)
        load_state(saved.reader, {"model": {name: x for name, x in part.state_dict().items() if name not in frozen}})
