"""metrics.jsonl, evaluation.jsonl and TensorBoard, written by rank 0."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from torchtitan_cp.metrics.record import StepRecord

JSONL = "metrics.jsonl"
EVALUATIONS = "evaluation.jsonl"
TENSORBOARD = "tensorboard"
# Where each field of a record shows in TensorBoard.
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
    "pipeline_idle": "speed/pipeline_idle",
    "data_wait_seconds": "speed/data_wait_seconds",
    "peak_memory_bytes": "memory/peak_bytes",
    "stage_number": "curriculum/stage",
    "seq_len": "curriculum/seq_len",
    "cp": "curriculum/cp",
    "tokens": "curriculum/tokens_seen",
}


class MetricsWriter:
    """Writes each step to metrics.jsonl, and every `interval`-th to TensorBoard.

    Args:
        folder: of the run.
        after_step: steps after this one are forgotten: a resumed run takes them again.
        tensorboard: whether to write tensorboard/.
        interval: optimizer steps between TensorBoard points.
    """

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool, interval: int) -> None:
        self.interval = interval
        path = folder / JSONL
        _forget_after(path, after_step)
        self.lines = path.open("a", encoding="utf-8")
        _forget_after(folder / EVALUATIONS, after_step)
        self.evaluations = (folder / EVALUATIONS).open("a", encoding="utf-8")
        self.board = SummaryWriter(str(folder / TENSORBOARD), purge_step=after_step + 1) if tensorboard else None

    def step(self, record: StepRecord) -> None:
        """Write one optimizer step."""
        self.lines.write(json.dumps(dataclasses.asdict(record)) + "\n")
        self.lines.flush()
        if self.board and record.step % self.interval == 0:
            for field, tag in TAGS.items():
                value = getattr(record, field)
                if value is not None:
                    self.board.add_scalar(tag, value, record.step)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Write what an evaluation found, with its `step`, as a line of evaluation.jsonl."""
        self.evaluations.write(json.dumps(record) + "\n")
        self.evaluations.flush()

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Write a number to TensorBoard."""
        if self.board:
            self.board.add_scalar(tag, value, step)

    def image(self, tag: str, array: np.ndarray, step: int) -> None:
        """Write a picture, `[height, width, 3]` uint8, to TensorBoard."""
        if self.board:
            self.board.add_image(tag, array, step, dataformats="HWC")

    def text(self, tag: str, text: str, step: int) -> None:
        """Write a text, in Markdown, to TensorBoard."""
        if self.board:
            self.board.add_text(tag, text, step)

    def lengths(self, source: str, tokens: np.ndarray) -> None:
        """Show how long a source's documents are, in powers of two of tokens. `tokens`: `[documents]`."""
        if self.board and len(tokens):
            self.board.add_histogram(f"documents/{source}, log2 of tokens", np.log2(np.maximum(tokens, 1)), 0)

    def close(self) -> None:
        self.lines.close()
        self.evaluations.close()
        if self.board:
            self.board.close()


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
