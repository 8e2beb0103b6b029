"""A run's folder read without its tensors: where a checkpoint stands, and the config that it was trained with.

It imports nothing of torch.distributed.checkpoint, as `check` reads the run that another one starts from.
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_cp.checkpoint.progress import PROGRESS_FILE, DamagedError, Progress, read_progress
from torchtitan_cp.config import Config, ConfigError, load_config
from torchtitan_cp.config.json_types import JsonObject
from torchtitan_cp.config.load import build
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.run_folder import CHECKPOINTS, RUN_CONFIG
from torchtitan_cp.config.sections import Stage

NAME = re.compile(r"step-(\d+)")
# The tokenizer that the run trained, in the run's folder: the corpus may have changed or moved since.
TOKENIZER_FILE = "tokenizer.model"


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint and its run, without the tensors.

    Attributes:
        path: the folder of the checkpoint, in the run's `checkpoints`.
        config: as the run wrote it, with the path of the tokenizer that the run trained and the rope of `stage`.
        stage_index: of the last stage that the run had begun, from 0.
        progress: where the run stood.
    """

    path: Path
    config: Config
    stage_index: int
    progress: Progress

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


def list_folder(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder; none if it does not exist.

    Raises:
        OSError: it cannot be read. pathlib's glob and is_dir take that for an empty folder, and for no folder.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return list(entries)
    return []


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each checkpoint that has its final name, oldest first; their files are not verified.

    Raises:
        OSError: the folder cannot be read.
    """
    named = [(NAME.fullmatch(entry.name), entry) for entry in list_folder(folder)]
    return sorted((int(match[1]), folder / match[0]) for match, entry in named if match and entry.is_dir())


def read_saved_run(path: Path) -> SavedRun:
    """Read the progress and the config of a checkpoint. Its other files are not verified.

    Args:
        path: a checkpoint's folder in its run, whatever its name, or a link to one; or a run's folder, whose newest
            checkpoint is taken.

    Raises:
        ConfigError: there is none, its progress cannot be read, or the run's config.toml is not where the run wrote it.
    """
    path = path.absolute()
    if not (path / PROGRESS_FILE).is_file():
        complete = complete_checkpoints(path / CHECKPOINTS) or complete_checkpoints(path)
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
    try:
        progress = read_progress(path)
    except DamagedError as error:
        raise ConfigError(f"{path} is damaged: {error}", fix="use another checkpoint of the run") from None
    index = max(map(int, progress.stage_losses), default=0)
    if str(index) in progress.ropes:  # the config may have another rope by now
        values = progress.ropes[str(index)]
        rope = build(Rope, values, where=f"curriculum.stages[{index}].rope", file=str(path)) if values else None
        stages = list(config.curriculum.stages)
        stages[index] = replace(stages[index], rope=rope)
        config = config.with_keys(curriculum={"stages": tuple(stages)})
    return SavedRun(path, config, index, progress)


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
