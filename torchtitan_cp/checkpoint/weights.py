"""The weights of a finished checkpoint, read by one process: for export and generation."""

import dataclasses
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from torchtitan_cp.checkpoint.manager import PROGRESS_FILE, CheckpointManager, first_failure
from torchtitan_cp.checkpoint.manifest import read_manifest
from torchtitan_cp.checkpoint.reader import CheckpointPlanner, CheckpointReader, read_table
from torchtitan_cp.config import Config, ConfigError, load_config
from torchtitan_cp.config.sections import Stage

PREFIX = "model."
# In a run's folder: the tokenizer, where it was trained on the corpus; that may change, or be elsewhere.
TOKENIZER_FILE = "tokenizer.model"


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's model.

    Attributes:
        path: the step-N folder.
        config: of the run; a tokenizer that it trained is a file there.
        stage: the last that the run had begun.
        sizes: of the shape.
        short_loss: see Progress.
        tensors: name -> (size, dtype) of each parameter.
        table: where they lie in which file.
    """

    path: Path
    config: Config
    stage: Stage
    sizes: dict[str, Any]
    short_loss: float | None
    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    table: Metadata

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """These parameters, whole, on the host.

        Raises:
            ConfigError: a file cannot be read; the run may have deleted the checkpoint since it was opened.
        """
        values = {name: torch.empty(self.tensors[name][0], dtype=self.tensors[name][1]) for name in names}
        with warnings.catch_warnings():
            # One process is what is meant; torch wonders about it.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            _load(self, values, no_dist=True)
        return values

    def model_args(self, kind: type) -> Any:
        """The sizes as a shape of this kind."""
        return kind(**{name: tuple(size) if isinstance(size, list) else size for name, size in self.sizes.items()})


def open_saved_model(path: Path) -> SavedModel:
    """Look into a checkpoint.

    Args:
        path: a step-N folder, or a run's folder, whose newest checkpoint is taken.

    Raises:
        ConfigError: there is none, or the run's config.toml is not where the run wrote it.
    """
    path = path.absolute()
    if not (path / PROGRESS_FILE).is_file():
        complete = CheckpointManager(path / "checkpoints").complete()
        if not complete:
            raise ConfigError(
                f"{path} is no checkpoint and has none", fix="give a run's folder, or .../checkpoints/step-N"
            )
        path = complete[-1][1]
    config = load_config(path.parents[1] / "config.toml")
    own = path.parents[1] / TOKENIZER_FILE
    if config.tokenizer.kind == "sentencepiece" and not config.tokenizer.path and own.is_file():
        config = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, path=str(own)))
    progress = json.loads((path / PROGRESS_FILE).read_text(encoding="utf-8"))
    stage = config.curriculum.stages[max(map(int, progress["stage_losses"]), default=0)]
    table = read_table(path, read_manifest(path))
    saved: dict[str, Any] = table.state_dict_metadata
    tensors = {
        name.removeprefix(PREFIX): (entry.size, entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(PREFIX)
    }
    return SavedModel(path, config, stage, progress["identity"]["model"], progress["short_loss"], tensors, table)


def load_weights(saved: SavedModel, parts: Iterable[nn.Module]) -> None:
    """Fill the parts, sharded in any way, each rank reading its own. Collective.

    Raises:
        ConfigError: as `SavedModel.read`.
    """
    for part in parts:
        values = get_model_state_dict(part)
        _load(saved, values, no_dist=False)
        set_model_state_dict(part, values)


def _load(saved: SavedModel, values: dict[str, Any], *, no_dist: bool) -> None:
    reader = CheckpointReader(saved.path, saved.table)
    try:
        dcp.load({"model": values}, storage_reader=reader, planner=CheckpointPlanner(), no_dist=no_dist)
    except CheckpointException as error:  # which is no Exception
        raise ConfigError(
            f"{saved.path} cannot be read: {first_failure(error)}", fix="take another checkpoint of the run"
        ) from None
