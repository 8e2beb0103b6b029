"""Where a run stands, and whether a checkpoint belongs to the run that would resume from it."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_cp.config import ConfigError

PROGRESS_FILE = "progress.json"


class DamagedError(Exception):
    """A checkpoint's progress or manifest is missing or cannot be understood."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands, as plain JSON. Learning rates and random numbers follow from the step.

    Attributes:
        step: optimizer steps begun (skipped ones and those that were rolled back too): it never falls.
        cursor: tokens trained on, over all ranks; no rank count in it.
        stage: number of the stage at hand; stage_step: its optimizer steps that were taken and stand.
        stage_done: it ended before its last step, as its gate opened.
        source_tokens: of each source's stream, what the stages before this one took.
        identity: what must be the same to resume: the model's sizes, the data.
        block_tokens: block of the data order; another one reorders what is still to come.
        short_loss: newest held-out loss of the first stage, at its length.
        passed_over: text that is not trained on: [stage, first, stop], the stage's steps of text in [first, stop).
        health: how far up the ladder the run is; see health.LadderState.
        recent: what spikes are judged by; see health.SpikeDetector.
        recipe: of the stage at hand, what says where in the text a step reads; see StagePlan.text_recipe.
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
    passed_over: list[list[int]] = dataclasses.field(default_factory=list)
    health: dict[str, Any] = dataclasses.field(default_factory=dict)
    recent: list[list[float]] = dataclasses.field(default_factory=list)
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    stage_losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def passed(self, stage: int) -> int:
        """Steps of text that a stage passed over: its next step reads the text of step stage_step + this."""
        return sum(stop - first for number, first, stop in self.passed_over if number == stage)

    def skipping(self) -> "Progress":
        """After a step that was begun and changed nothing: its text is passed over."""
        here = self.stage_step + self.passed(self.stage)
        return dataclasses.replace(
            self, step=self.step + 1, passed_over=[*self.passed_over, [self.stage, here, here + 1]]
        )

    def back_to(self, saved: "Progress") -> "Progress":
        """After a step that sends the run back to a checkpoint: the text since then is passed over.

        Of the stage at hand, that is: what a stage before it is to take again, it reads again.
        """
        same = saved.stage == self.stage
        first = saved.stage_step + saved.passed(self.stage) if same else 0
        stop = self.stage_step + self.passed(self.stage) + 1
        return dataclasses.replace(
            saved,
            step=self.step + 1,
            passed_over=[*saved.passed_over, [self.stage, first, stop]],
            block_tokens=self.block_tokens,
        )


def read_progress(folder: Path) -> Progress:
    """Where the run of a checkpoint stood.

    Raises:
        DamagedError: its file is missing, or was written by another version of this program.
    """
    try:
        return Progress(**json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8")))
    except TypeError as error:
        raise DamagedError(f"{PROGRESS_FILE} was written by another version of this program: {error}") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{PROGRESS_FILE} cannot be read ({type(error).__name__}: {error})") from None


def check_identity(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Refuse to resume with another model or other data.

    Raises:
        ConfigError: naming what differs.
    """
    for name, value in now.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{path} was written with {name} {saved.get(name)}, and the config now gives {value}",
                fix="undo the change, or give the new run a folder of its own: --job.dump_folder=...",
            )
