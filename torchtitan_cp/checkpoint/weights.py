"""Reads the model of a checkpoint, for export, generation and evaluation."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_cp.checkpoint.load import CheckpointReader, load_state
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.manifest import verify_checkpoint
from torchtitan_cp.checkpoint.progress import PROGRESS_FILE, Progress, read_progress
from torchtitan_cp.config import Config, ConfigError, load_config
from torchtitan_cp.config.json_types import JsonObject
from torchtitan_cp.config.load import build
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.run_folder import CHECKPOINTS, RUN_CONFIG
from torchtitan_cp.config.sections import Stage

PREFIX = "model."
# The tokenizer that the run trained, in the run's folder: the corpus may have changed or moved since.
TOKENIZER_FILE = "tokenizer.model"


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's model.

    Attributes:
        path: the folder of the checkpoint, in the run's `checkpoints`.
        config: as the run wrote it, with the path of the tokenizer that the run trained and the rope of `stage`.
        stage_index: of the last stage that the run had begun, from 0.
        progress: where the run stood.
        tensors: name -> (size, dtype) of each parameter.
        reader: of the checkpoint's files.
    """

    path: Path
    config: Config
    stage_index: int
    progress: Progress
    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    reader: CheckpointReader

    @property
    def name(self) -> str:
        """Its name in the run, whatever its folder is called now."""
        return f"step-{self.step}"

    @property
    def step(self) -> int:
        """How many steps the run had taken."""
        return self.progress.step

    @property
    def run_folder(self) -> Path:
        """The folder of the run that wrote it."""
        return self.path.parent.parent

    @property
    def stage(self) -> Stage:
        """The last stage that the run had begun."""
        return self.config.curriculum.stages[self.stage_index]

    @property
    def sizes(self) -> JsonObject:
        """The model's sizes by name, the vocabulary among them: what `training.registry.args_from` makes args of."""
        sizes = self.progress.identity["model"]
        assert isinstance(sizes, dict)
        return sizes

    @property
    def length_note(self) -> str:
        """What a command says if it is to read more tokens than the checkpoint was trained on."""
        return f"note: longer than the {self.stage.seq_len} tokens that {self.path} was trained on"

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
        path: a checkpoint's folder in its run, whatever its name, or a link to one; or a run's folder, whose newest
            checkpoint is taken.
        collective: all ranks call, and share the work of verifying.

    Raises:
        ConfigError: there is none, it is damaged, or the run's config.toml is not where the run wrote it.
    """
    path = path.absolute()
    if not (path / PROGRESS_FILE).is_file():
        complete = CheckpointManager(path / CHECKPOINTS).complete() or CheckpointManager(path).complete()
        if not complete:
            raise ConfigError(
                f"{path} is not a checkpoint and contains none", fix="give a run's folder, or .../checkpoints/step-N"
            )
        path = complete[-1][1]
    path = _in_its_run(path)
    run = path.parent.parent
    run_config, tokenizer = run / RUN_CONFIG, run / TOKENIZER_FILE
    config = load_config(run_config)
    if "\nbos = " not in run_config.read_text(encoding="utf-8"):  # the run is from before the key existed
        config = config.with_keys(tokenizer={"bos": False})
    if config.tokenizer.trained and tokenizer.is_file():
        config = config.with_keys(tokenizer={"path": str(tokenizer)})
    if damage := verify_checkpoint(path, collective=collective):
        raise ConfigError(f"{path} is damaged: {'; '.join(damage)}", fix="use another checkpoint of the run")
    progress, reader = read_progress(path), CheckpointReader(path)
    tensors = {
        name.removeprefix(PREFIX): (entry.size, entry.properties.dtype)
        for name, entry in reader.table.state_dict_metadata.items()
        if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    index = max(map(int, progress.stage_losses), default=0)
    if str(index) in progress.ropes:  # the config may have another rope by now
        values = progress.ropes[str(index)]
        rope = build(Rope, values, where=f"curriculum.stages[{index}].rope", file=str(path)) if values else None
        stages = list(config.curriculum.stages)
        stages[index] = replace(stages[index], rope=rope)
        config = config.with_keys(curriculum={"stages": tuple(stages)})
    return SavedModel(path, config, index, progress, tensors, reader)


def _in_its_run(path: Path) -> Path:
    """The path of a checkpoint by which its run is found: where its links lead, or as given.

    Raises:
        ConfigError: it lies outside its run.
    """
    for place in (path.resolve(), path):
        if (place.parent.parent / RUN_CONFIG).is_file():
            return place
    run = path.parent.parent
    raise ConfigError(
        f"{path} is a checkpoint outside its run: {run / RUN_CONFIG} is missing",
        fix=f"give it inside its run, as RUN/{CHECKPOINTS}/step-N, or copy {RUN_CONFIG}, and {TOKENIZER_FILE} if there "
        f"is one, from the run's folder to {run}",
    )


def load_weights(saved: SavedModel, parts: Iterable[nn.Module]) -> None:
    """Fill the parts of a model, sharded in any way; each rank reads its own shards. Collective.

    Raises:
        ConfigError: as `SavedModel.read`.
    """
    for part in parts:
        load_state(saved.reader, {"model": part.state_dict()})
