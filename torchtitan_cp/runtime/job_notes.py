"""Notes of a node's ranks to its launcher: why the job ends, that it was stopped, or relaunches on another mesh.

Each rank writes a note of its own to a folder that the launcher makes and removes. Without a launcher, ranks print.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from torchtitan_cp.runtime.environment import has_ended, launcher_pid

FOLDER_VARIABLE = "TORCHTITAN_CP_JOB_NOTES"
# A rank that has written its note waits for the launcher to end it, so that no other rank sees a lost connection.
WAIT_SECONDS = 30.0


class EndNote(NamedTuple):
    """Why a job ends: the exit code, and a message for the last line on the screen ("" for none)."""

    code: int
    message: str


def end_job(message: str, code: int) -> int:
    """End the job on all ranks without another attempt. Returns the exit code of this process.

    Under the launcher, which prints the message, this does not return. Without one, or after
    its end, rank 0 prints it.
    """
    folder, launcher = os.environ.get(FOLDER_VARIABLE), launcher_pid()
    if launcher and has_ended(launcher):
        folder = None
    if folder:
        note = Path(folder) / f"end-{os.environ['LOCAL_RANK']}"
        partial = note.with_name(f"partial-{note.name}")
        try:
            partial.write_text(json.dumps([code, message]))
            partial.rename(note)
            time.sleep(WAIT_SECONDS)
            return code
        except OSError as error:  # no room in the temporary folder
            print(f"could not write the reason for the launcher: {error}", file=sys.stderr)
    if message and (folder or os.environ.get("RANK", "0") == "0"):
        print(message, file=sys.stderr)
    return code


def ask_for_relaunch() -> None:
    """Have the launcher start the ranks again when all have ended: the next stage needs another mesh."""
    _touch("relaunch")


def note_stop() -> None:
    """Have the launcher know that a stop signal, maybe on another node, ended the run before its end."""
    _touch("stopped")


def _touch(name: str) -> None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and os.environ.get("LOCAL_RANK") == "0":
        (Path(folder) / name).touch()


def end_notes(folder: Path) -> list[tuple[float, EndNote]]:
    """The notes of a node's ranks, each with the time it was written (Unix seconds), oldest first."""
    found = [(path.stat().st_mtime, EndNote(*json.loads(path.read_text()))) for path in folder.glob("end-*")]
    return sorted(found)


def is_unfinished(folder: Path) -> bool:
    """Whether the ranks noted a stop, or a relaunch that is not taken yet."""
    return (folder / "stopped").exists() or (folder / "relaunch").exists()


def take_relaunch(folder: Path) -> bool:
    """Whether the ranks asked for a relaunch, which is forgotten with this call."""
    asked = (folder / "relaunch").exists()
    (folder / "relaunch").unlink(missing_ok=True)
    return asked
