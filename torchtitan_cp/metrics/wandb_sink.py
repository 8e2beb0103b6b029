"""Weights & Biases gets the same numbers, images and texts as TensorBoard."""

import hashlib
import html
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.extras import import_extra


class WandbSink:
    """Logs to a project of Weights & Biases, in a run named after the run's folder.

    Weights & Biases ignores steps that a resumed run repeats. With WANDB_MODE=offline nothing leaves the machine.

    Args:
        project: where the run is shown; made there if it is new.
        folder: its name is the run's, and files of the run are written below it.

    Raises:
        ConfigError: the package `wandb` is missing, or it opens no run: nobody is logged in, or the name is invalid.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, folder: Path) -> None:
        self.wandb = import_extra("wandb", extra="wandb", needed_by="metrics.wandb")
        self.errors = (self.wandb.errors.Error,)
        # Folders of two runs may have the same name.
        run_id = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        names = {"project": project, "name": folder.name, "id": run_id}
        try:
            self.run = self.wandb.init(**names, dir=str(folder), resume="allow")
        except self.errors as error:
            raise ConfigError(
                f"metrics.wandb = {project!r}: Weights & Biases cannot open run {folder.name!r}: {error}",
                fix="log in with `wandb login`, set WANDB_MODE=offline in the environment, or leave metrics.wandb out",
            ) from None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        self.run.log({tag: self.wandb.Image(pixels)}, step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        self.run.log({tag: self.wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self) -> None:
        self.run.finish()
