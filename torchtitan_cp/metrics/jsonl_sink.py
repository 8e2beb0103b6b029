"""metrics.jsonl, a line for each step, and evaluation.jsonl, a line for each evaluation."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from torchtitan_cp.config import UserError
from torchtitan_cp.config.json_types import Json
from torchtitan_cp.metrics.step_record import StepRecord

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"


class JsonLinesSink:
    """Writes metrics.jsonl and evaluation.jsonl. A full disk does not end training.

    Args:
        after_step: lines of later steps are dropped, because a resumed run repeats those steps.
        evaluates_again: the evaluation of that step is repeated too.

    Raises:
        UserError: the lines cannot be dropped; the files are unchanged.
    """

    name = METRICS_FILE

    def __init__(self, folder: Path, after_step: int, *, evaluates_again: bool = False) -> None:
        self.metrics = LineFile(folder / METRICS_FILE, after_step)
        self.evaluations = LineFile(folder / EVALUATION_FILE, after_step - evaluates_again)

    def step(self, record: StepRecord) -> None:
        self.metrics.write(json.dumps(dataclasses.asdict(record)) + "\n")

    def evaluation(self, record: Mapping[str, Json]) -> None:
        self.evaluations.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self.metrics.close()
        self.evaluations.close()


class LineFile:
    """A file to append lines to. On a full disk, lines are kept and written before the next one.

    Args:
        path: created if missing.
        after_step: lines of later steps are dropped, and so is a line that a killed run left half written.

    Raises:
        UserError: as JsonLinesSink.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        self.path, self.waiting = path, b""
        try:
            _drop_lines_after(path, after_step)
            self.file = path.open("ab", buffering=0)  # unbuffered, so that write says how much was written
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {error.strerror}; it is unchanged",
                fix="free some space or make the folder writable, then run the same command again",
            ) from error

    def write(self, line: str) -> None:
        """Append a line, or keep it for later; the first kept line is reported."""
        reported, self.waiting = bool(self.waiting), self.waiting + line.encode()
        try:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
        except OSError as error:
            if not reported:
                logger.error("%s: %s. Training goes on; lines are kept until there is room", self.path, error.strerror)

    def close(self) -> None:
        """Write the lines kept, or report how many are lost."""
        self.write("")
        if self.waiting:
            logger.error("%s: the last %d lines are lost", self.path, self.waiting.count(b"\n"))
        self.file.close()


class RetrievalFields(TypedDict):
    """The fields of Retrieval."""

    accuracy: list[list[float | None]]
    lengths: list[int]
    depths: list[float]


class EvaluationLine(TypedDict):
    """What is read back of a line of evaluation.jsonl; see EvaluationResult for the rest."""

    step: int
    stage: str
    seq_len: int
    loss: float | None
    by_source: dict[str, float | None]
    position_starts: list[int]
    position_losses: list[float | None]
    retrieval: dict[str, RetrievalFields]


def read_evaluations(folder: Path) -> list[EvaluationLine]:
    """The lines of evaluation.jsonl."""
    return [json.loads(line) for line in (folder / EVALUATION_FILE).read_text(encoding="utf-8").splitlines()]


def _drop_lines_after(path: Path, step: int) -> None:
    """Drop the lines of later steps, and unreadable ones, in place: it needs no space on the disk.

    Memory holds one line at a time, however long the run was.
    """
    path.touch()
    with path.open("rb") as lines, path.open("r+b") as file:
        read = kept = 0
        for line in lines:
            read += len(line)
            if line.endswith(b"\n") and _is_kept(line, step):
                kept += len(line)
                if kept < read:  # an earlier line was dropped
                    file.seek(kept - len(line))
                    file.write(line)
        file.truncate(kept)


def _is_kept(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except ValueError:
        return False
