"""Where a run stands, and whether what was saved belongs to the run that would go on."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_cp.config import ConfigError


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
        short_loss: newest held-out loss of the first stage, at its length.
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
