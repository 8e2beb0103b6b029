"""TensorBoard: scalars, images and texts, and a layout that shows what matters first."""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from torchtitan_cp.metrics.tensorboard_layout import is_charted, layout_event, split_line

TENSORBOARD_FOLDER = "tensorboard"
TAGS_FILE = "charted_tags.txt"  # of all starts of the run: a later start knows by it which charts have values


class TensorBoardSink:
    """Writes tensorboard/ in the run's folder.

    Events are written in the caller's thread. The thread of torch's SummaryWriter prints a traceback on a full disk.
    A chart of the layout appears when its first value does.

    Args:
        after_step: points of later steps are hidden, because a resumed run repeats those steps.

    Raises:
        OSError: a file cannot be written; the methods too.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, after_step: int) -> None:
        self.folder, self.after_step = folder / TENSORBOARD_FOLDER, after_step
        self.files: dict[str, EventFile] = {}  # by run
        self.tags_seen: set[str] = set()
        self.charted_tags: dict[str, None] = {}  # in the order of their first values
        self._file("")
        tags_path = self.folder / TAGS_FILE
        if after_step == 0:
            tags_path.unlink(missing_ok=True)  # whatever an earlier start wrote is hidden
        elif tags_path.exists():
            self._add_charts(tags_path.read_text(encoding="utf-8").splitlines())

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        # One event for all of a run: an event for each number takes ten times as long.
        points: dict[str, list[Summary.Value]] = {}
        for name, value in values.items():
            tag, run = split_line(name)
            points.setdefault(run, []).append(Summary.Value(tag=tag, simple_value=value))
        for run, of_run in points.items():
            self._add(Event(summary=Summary(value=of_run)), step, run)
        if new := dict.fromkeys(values).keys() - self.tags_seen:
            self.tags_seen |= new
            tags = dict.fromkeys(split_line(name)[0] for name in values if name in new)
            if charted := [tag for tag in tags if is_charted(tag) and tag not in self.charted_tags]:
                with (self.folder / TAGS_FILE).open("a", encoding="utf-8") as file:
                    file.writelines(f"{tag}\n" for tag in charted)
                self._add_charts(charted)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        self._add(Event(summary=summary.image(tag, pixels, dataformats="HWC")), step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._add(Event(summary=summary.text(tag, text)), step)

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _add_charts(self, tags: Iterable[str]) -> None:
        self.charted_tags |= dict.fromkeys(tags)
        self._add(layout_event(self.charted_tags), 0)

    def _add(self, event: Event, step: int, run: str = "") -> None:
        event.step, event.wall_time = step, time.time()
        self._file(run).records.write(event.SerializeToString())

    def _file(self, run: str) -> "EventFile":
        """The file of a run, empty for all that is not a line of its own; begun at its first event."""
        if run not in self.files:
            self.files[run] = EventFile(self.folder / run)
            self._add(Event(file_version="brain.Event:2"), 0, run)
            hidden_from = self.after_step + 1 if self.after_step else 0  # the evaluation at step 0 is repeated too
            self._add(Event(session_log=SessionLog(status=SessionLog.START)), hidden_from, run)
        return self.files[run]


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
