"""metrics.jsonl, evaluation.jsonl and TensorBoard, written by rank 0."""

import dataclasses
import html
import importlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from torchtitan_cp.config import ConfigError
from torchtitan_cp.metrics.record import StepRecord

logger = logging.getLogger(__name__)

JSONL = "metrics.jsonl"
EVALUATIONS = "evaluation.jsonl"
TENSORBOARD = "tensorboard"
# Where each field of a record shows in TensorBoard; one of several numbers, with the name of each behind a slash.
TAGS = {
    "loss": "train/loss",
    "perplexity": "train/perplexity",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "skipped": "health/skipped",
    "spikes": "health/spikes",
    "skipped_steps": "health/skipped_steps",
    "rollbacks": "health/rollbacks",
    "lr_cuts": "health/lr_cuts",
    "tokens_per_second": "speed/tokens_per_second",
    "tokens_per_second_per_rank": "speed/tokens_per_second_per_rank",
    "mfu": "speed/mfu",
    "step_seconds": "speed/step_seconds",
    "largest_logit": "health/largest_logit",
    "block_grad_norm": "grad_norm_by_block",
    "block_output": "largest_output_by_block",
    "loss_by_position": "loss_by_position",
    "loss_by_document_position": "loss_by_document_position",
    "loss_by_source": "loss_by_source",
    "mfu_mask": "speed/mfu_mask",
    "seconds": "seconds",
    "cp_imbalance": "speed/cp_imbalance",
    "unlabelled": "data/unlabelled_share",
    "memory_bytes": "memory",
    "pipeline_idle": "speed/pipeline_idle",
    "data_wait_seconds": "speed/data_wait_seconds",
    "peak_memory_bytes": "memory/peak_bytes",
    "stage_number": "curriculum/stage",
    "seq_len": "curriculum/seq_len",
    "cp": "curriculum/cp",
    "tokens": "curriculum/tokens_seen",
}


class PatientFile:
    """A file that lines are added to; what there is no room for goes before the next line.

    Args:
        path: is made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: what was written and what was not is known.
        self.path, self.file, self.waiting = path, path.open("ab", buffering=0), b""

    def write(self, line: str) -> None:
        """Add a line, or keep it for later; the first that is kept is told."""
        known, self.waiting = bool(self.waiting), self.waiting + line.encode()
        try:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
        except OSError as error:
            if not known:
                logger.error("%s: %s. Training goes on, and its lines wait for room", self.path, error.strerror)

    def close(self) -> None:
        """Add what waited, or say how much of it is lost."""
        self.write("")
        if self.waiting:
            logger.error("%s lacks its last %d lines", self.path, self.waiting.count(b"\n"))
        self.file.close()


class MetricsWriter:
    """Writes each step to metrics.jsonl, and every `interval`-th to TensorBoard. A full disk ends no training.

    Args:
        folder: of the run.
        after_step: steps after this one are forgotten: a resumed run takes them again.
        tensorboard: whether to write tensorboard/.
        interval: optimizer steps between TensorBoard points.
        wandb: project of Weights & Biases that gets all that TensorBoard gets; empty: none.

    Raises:
        ConfigError: its package is missing.
    """

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool, interval: int, wandb: str = "") -> None:
        self.interval = interval
        path = folder / JSONL
        _forget_after(path, after_step)
        self.lines = PatientFile(path)
        _forget_after(folder / EVALUATIONS, after_step)
        self.evaluations = PatientFile(folder / EVALUATIONS)
        self.boards: list[Any] = []
        if tensorboard:
            self.boards.append(SummaryWriter(str(folder / TENSORBOARD), purge_step=after_step + 1))
        if wandb:
            self.boards.append(WandbBoard(wandb, folder))

    def step(self, record: StepRecord) -> None:
        """Write one optimizer step."""
        self.lines.write(json.dumps(dataclasses.asdict(record)) + "\n")
        if record.step % self.interval == 0:
            for field, tag in TAGS.items():
                value = getattr(record, field)
                for name, number in value.items() if isinstance(value, dict) else [("", value)]:
                    if number is not None:
                        self.scalar(f"{tag}/{name}" if name else tag, number, record.step)

    def earlier_evaluations(self) -> list[dict[str, Any]]:
        """What `evaluation` wrote, also in the processes before this one."""
        return [json.loads(line) for line in self.evaluations.path.read_text(encoding="utf-8").splitlines()]

    def evaluation(self, record: dict[str, Any]) -> None:
        """Write what an evaluation found, with its `step`, as a line of evaluation.jsonl."""
        self.evaluations.write(json.dumps(record) + "\n")

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Write a number to TensorBoard."""
        self._show("add_scalar", tag, value, step)

    def image(self, tag: str, array: np.ndarray, step: int) -> None:
        """Write a picture, `[height, width, 3]` uint8, to TensorBoard."""
        self._show("add_image", tag, array, step, dataformats="HWC")

    def text(self, tag: str, text: str, step: int) -> None:
        """Write a text, in Markdown, to TensorBoard."""
        self._show("add_text", tag, text, step)

    def close(self) -> None:
        self.lines.close()
        self.evaluations.close()
        self._show("close")

    def _show(self, method: str, *arguments: Any, **named: Any) -> None:
        """Call every board. TensorBoard's thread does not outlive an error."""
        for board in list(self.boards):
            try:
                getattr(board, method)(*arguments, **named)
            except OSError as error:
                self.boards.remove(board)
                name = "TensorBoard" if isinstance(board, SummaryWriter) else "Weights & Biases"
                logger.error("%s stands still until the run's next start: %s. %s goes on", name, error, JSONL)


class WandbBoard:
    """Weights & Biases, with the methods of TensorBoard's writer that are used here.

    A run goes on under its name, the folder's. Its steps never fall there: those that a resumed run takes again are
    ignored. With WANDB_MODE=offline nothing leaves the machine.

    Args:
        project: its name; folder: of the run.
    """

    def __init__(self, project: str, folder: Path) -> None:
        try:
            self.wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                "metrics.wandb needs the package `wandb`, which is not installed",
                fix="pip install 'torchtitan-cp[wandb]'",
            ) from error
        self.run = self.wandb.init(project=project, name=folder.name, id=folder.name, dir=str(folder), resume="allow")

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.run.log({tag: value}, step=step)

    def add_image(self, tag: str, array: np.ndarray, step: int, dataformats: str) -> None:
        self.run.log({tag: self.wandb.Image(array)}, step=step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.run.log({tag: self.wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self) -> None:
        self.run.finish()


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and a last line that a killed run left half written."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            continue
    aside = path.with_suffix(".partial")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(path)
