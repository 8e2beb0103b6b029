"""Where a run stands, the data cursor included, and whether a checkpoint belongs to the run that resumes from it."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.json_types import Json, JsonObject

PROGRESS_FILE = "progress.json"
# The progress after the evaluation of a stage's end, which follows the save of its last step. Not in the manifest:
# without it that evaluation is only made again.
EVALUATED_FILE = "evaluated.json"
# Names of keys in checkpoints of the version before this one, and their names now.
RENAMED_KEYS = {"recent": "spike_history", "text_recipe": "text_settings"}


class DamagedError(Exception):
    """A checkpoint's progress or manifest is missing or cannot be read."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands, as plain JSON. Learning rates and random numbers follow from `stage` and `stage_step`.

    The data cursor, which says what text the next step reads, is `stage`, `stage_step`, `skipped_ranges` and
    `source_tokens`. No rank is in it, so any number of ranks resumes at the same text. The next step reads the
    stage's batch number `text_step`; the stage's streams start where `source_tokens` ends.

    Attributes:
        step: optimizer steps begun, including skipped and rolled-back ones, so that it never decreases.
        trained_tokens: over all ranks; for the metrics.
        stage: index of the current stage; stage_step: its optimizer steps that were taken and not rolled back.
        stage_done: the stage ended before its last step, as its gate opened.
        evaluated_step: step at which the newest evaluation of a stage's end was finished.
        source_tokens: tokens of each source that the stages before this one read.
        read_tokens: the same including this stage, once it has no steps left; empty before.
        identity: what must be the same to resume: the model's sizes, the data.
        block_tokens: block size of the data order; another size reorders the text that is left.
        data_order: keys of [data] that also decide the data order.
        short_loss: newest held-out loss at the length of the first stage; short_tokens: its evaluation.tokens.
        trained_seconds: by rank 0's clock; evaluation_seconds: the same of evaluation.
        skipped_ranges: text that is not trained on, as [stage, first, stop]: the stage's text steps in [first, stop).
        health: what bad steps have led to; see health.recovery.RecoveryState.
        spike_history: numbers of the last healthy steps; see health.monitor.SpikeDetector.
        text_settings: what decides which text a step of the current stage reads; see ResolvedStage.text_settings.
        ropes: by stage number, the newest `rope` of each stage entered; None: the model's own.
        stage_losses: by stage number, the first and last training loss of each stage begun, and the steps taken.
    """

    step: int = 0
    trained_tokens: int = 0
    stage: int = 0
    stage_step: int = 0
    stage_done: bool = False
    evaluated_step: int = 0
    source_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    read_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    identity: JsonObject = dataclasses.field(default_factory=dict)
    block_tokens: int = 0
    data_order: JsonObject = dataclasses.field(default_factory=dict)
    short_loss: float | None = None
    short_tokens: int = 0
    trained_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    skipped_ranges: list[list[int]] = dataclasses.field(default_factory=list)
    health: dict[str, int] = dataclasses.field(default_factory=dict)
    spike_history: list[list[float]] = dataclasses.field(default_factory=list)
    text_settings: JsonObject = dataclasses.field(default_factory=dict)
    ropes: dict[str, JsonObject | None] = dataclasses.field(default_factory=dict)
    stage_losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, saved: Mapping[str, object]) -> "Progress":
        """The progress that a checkpoint of this version, or of the one before, holds."""
        values: dict[str, Any] = {RENAMED_KEYS.get(key, key): value for key, value in dict(saved).items()}
        if seconds := values.pop("seconds", None):
            values["trained_seconds"], values["evaluation_seconds"] = seconds
        return cls(**values)

    def skipped_steps(self, stage: int) -> int:
        """How many steps of a stage's text are skipped."""
        return sum(stop - first for number, first, stop in self.skipped_ranges if number == stage)

    @property
    def taken_steps(self) -> dict[int, int]:
        """Steps that each stage before this one took, as far as the checkpoint says."""
        return {int(stage): int(row[2]) for stage, row in self.stage_losses.items() if int(stage) < self.stage}

    @property
    def healthy(self) -> bool:
        """Whether the last step was healthy, so that recovery may go back to this checkpoint."""
        return not self.health.get("bad_steps")

    @property
    def healthy_since_rollback(self) -> bool:
        """Whether a step was taken since the last rollback, or there was none."""
        return self.health.get("rolled_back_to", -1) < 0 or bool(self.health.get("healthy_steps"))

    @property
    def text_step(self) -> int:
        """Which step of the stage's text comes next, after those taken and those skipped."""
        return self.stage_step + self.skipped_steps(self.stage)

    def after_skip(self) -> "Progress":
        """The progress after a step that changed nothing, whose text is skipped."""
        skipped = [self.stage, self.text_step, self.text_step + 1]
        return dataclasses.replace(self, step=self.step + 1, skipped_ranges=[*self.skipped_ranges, skipped])

    def after_rollback(self, saved: "Progress") -> "Progress":
        """The progress after a step that sent the run back to a checkpoint. The text read since then is skipped.

        That is only the current stage's text: if an earlier stage is trained again, it reads its text again.
        """
        first = saved.text_step if saved.stage == self.stage else 0
        step = self.step + 1
        back = dataclasses.replace(
            saved,
            step=step,
            evaluated_step=step if saved.evaluated_step == saved.step else saved.evaluated_step,
            skipped_ranges=[*saved.skipped_ranges, [self.stage, first, self.text_step + 1]],
        )
        return back.under_config_of(self)

    def under_config_of(self, other: "Progress") -> "Progress":
        """This progress with the fields of `other` that follow from the config."""
        return dataclasses.replace(
            self, block_tokens=other.block_tokens, data_order=other.data_order, identity=other.identity
        )


def read_progress(folder: Path) -> Progress:
    """Where the run of a checkpoint stood, after the evaluation of its step if that was finished.

    Raises:
        DamagedError: its file is missing, or was written by another version of this program.
    """
    try:
        progress = Progress.from_json(json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8")))
        with suppress(OSError, ValueError, TypeError):
            return Progress.from_json(json.loads((folder / EVALUATED_FILE).read_text(encoding="utf-8")))
        return progress
    except TypeError as error:
        raise DamagedError(f"{PROGRESS_FILE} was written by another version of this program: {error}") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{PROGRESS_FILE} cannot be read ({type(error).__name__}: {error})") from None


FRESH = "fresh"  # base weights that no file holds
NEW_RUN = "give the new run a folder of its own: --job.dump_folder=..."


def check_identity(
    saved: JsonObject,
    now: JsonObject,
    path: Path,
    otherwise: str = NEW_RUN,
    data_changes: Callable[[], str] = lambda: "",
) -> None:
    """Raise if the model or the data differ from those of a checkpoint.

    Args:
        otherwise: the fix for a user who wants the change.
        data_changes: says in a few words what made the data differ, as far as it is known.

    Raises:
        ConfigError: naming what differs.
    """
    saved = {"lora": "none", **saved}  # earlier versions trained all weights, or had no other base
    if isinstance(saved["lora"], dict):
        saved = {"base weights": FRESH, **saved, "lora": {"base": "bfloat16", **saved["lora"]}}
    for name, value in now.items():
        if _compared(saved.get(name, value)) == _compared(value):
            continue
        was, is_now = differing(saved[name], value)
        differ, fix = f"was written with {name} {was}, and the config now gives {is_now}", "undo the change"
        if name.startswith("data"):  # digests of tokens, which say nothing to a reader
            of, why = "", data_changes()
            if isinstance(was, dict) and isinstance(is_now, dict):
                of = f" of {', '.join({**was, **is_now})}"
            differ = f"was written with other tokens{of} than the config now gives{': ' * bool(why)}{why}"
            fix = "undo the change of the text, the tokenizer or their settings"
        raise ConfigError(f"{path} {differ}", fix=f"{fix}, or {otherwise}")


def _compared(value: Json) -> Json:
    """What of a value is compared: of files with a digest, that, as they may have moved."""
    return value["digest"] if isinstance(value, dict) and "digest" in value else value


def differing(was: Json, now: Json) -> tuple[Json, Json]:
    """The entries in which two nested tables differ; other values as they are."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return was, now
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    pairs = {name: differing(was.get(name), now.get(name)) for name in names}
    return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}
