"""TensorBoard: scalars, images and texts, and a layout that shows what matters first."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

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

    Events are written in the caller's thread. The thread of torch's SummaryWriter prints a traceback on a full disk.

    Args:
        after_step: points of later steps are hidden, because a resumed run repeats those steps.

    Raises:
        OSError: the file cannot be written; the methods too.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, after_step: int) -> None:
        self.file = EventFile(folder / TENSORBOARD_FOLDER)
        self._add(Event(file_version="brain.Event:2"), 0)
        self._add(Event(session_log=SessionLog(status=SessionLog.START)), after_step + 1)
        layout = {}
        for group, charts in LAYOUT.items():
            layout[group] = {title: ["Multiline", [pattern]] for title, pattern in charts.items()}
        self._add(Event(summary=summary.custom_scalars(layout)), 0)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        # One event for all: an event for each number takes ten times as long.
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(Event(summary=Summary(value=points)), step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        self._add(Event(summary=summary.image(tag, pixels, dataformats="HWC")), step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._add(Event(summary=summary.text(tag, text)), step)

    def close(self) -> None:
        self.file.close()

    def _add(self, event: Event, step: int) -> None:
        event.step, event.wall_time = step, time.time()
        self.file.records.write(event.SerializeToString())


class EventFile:
    """A new file that TensorBoard reads, named as TensorBoard's own and after those that exist.

    Args:
        folder: created if missing.

    Attributes:
        records: writes events as records, each at once.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = (folder / name).open("xb", buffering=0)  # unbuffered, so that write says how much was written
        self.records = RecordWriter(self)

    def write(self, record: bytes) -> None:
        while record:
            record = record[self.file.write(record) :]

    def close(self) -> None:
        self.file.close()
