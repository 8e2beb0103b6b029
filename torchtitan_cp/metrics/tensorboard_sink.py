"""TensorBoard: scalars, images and texts, and a layout that shows what matters first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

TENSORBOARD_FOLDER = "tensorboard"
# The tab CUSTOM SCALARS: group -> title of a chart -> pattern of its tags.
LAYOUT = {
    "Loss": {"train": "train/loss$", "by position": "loss_by_position/", "gradient norm": "train/grad_norm$"},
    "Validation": {
        "loss on held-out text": "validation/(unigram_|stage_)?loss$",
        "by turn of a conversation": "validation/loss_by_turn/",
        "context gain": "validation/context_gain$",
        "retrieval accuracy": "validation/.*_accuracy$",
        "rise of the loss at the first stage's length": "validation/short_loss_rise$",
    },
    "Throughput": {
        "tokens per second": "speed/tokens_per_second$",
        "MFU": "speed/mfu",
        "seconds of a step": "(seconds/|speed/(step|data_wait)_seconds$)",
    },
    "Memory": {"peak of any rank": "memory/peak_bytes$", "rank 0, by kind": "memory/(?!peak)"},
    "Curriculum": {
        "stage": "curriculum/stage$",
        "sequence length": "curriculum/seq_len$",
        "context-parallel degree": "curriculum/cp$",
        "learning rate": "train/lr$",
        "gate": "gate/",
    },
}


class TensorBoardSink:
    """Writes tensorboard/ in the run's folder.

    Args:
        folder: of the run.
        after_step: points of later steps are hidden, because a resumed run repeats those steps.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, after_step: int) -> None:
        self.writer: Any = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=after_step + 1)
        layout = {}
        for group, charts in LAYOUT.items():
            layout[group] = {title: ["Multiline", [pattern]] for title, pattern in charts.items()}
        self.writer.add_custom_scalars(layout)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        # One event for all: add_scalar writes an event for each number, which takes ten times as long.
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.writer.file_writer.add_summary(Summary(value=points), step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        self.writer.add_image(tag, pixels, step, dataformats="HWC")

    def text(self, tag: str, text: str, step: int) -> None:
        self.writer.add_text(tag, text, step)

    def close(self) -> None:
        self.writer.close()
