"""Writes the cases of a part of `benchmarks/cuda.sh` as they come: one that is cut off leaves what it found."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cuda import LOG, ROOT, Line, append, kill_descendants, last_lines


class Record:
    """Writes the cases of a part.

    Args:
        path: of the results.
        part: its name.
        rehearsal: on a CPU, in the smallest sizes.
    """

    def __init__(self, path: Path, part: str, rehearsal: bool) -> None:
        self.path, self.part, self.rehearsal, self.failed = path, part, rehearsal, False

    def command(self, command: Sequence[str], until: Callable[[], bool] = lambda: False) -> str:
        """Run it to its end, or until something holds and it is killed with all that it started.

        Returns:
            why it failed; "" if it did not, or was killed.
        """
        log = self.path.parent / LOG
        start = log.stat().st_size if log.exists() else 0
        process = subprocess.Popen(command, cwd=ROOT)
        while process.poll() is None:
            if until():
                kill_descendants(os.getpid())
                return ""
            time.sleep(0.02)
        said = " ".join(last_lines(log, start)[-3:]) if log.exists() else ""
        return f"exit code {process.returncode}: {said}"[:500] if process.returncode else ""

    def case(self, name: str, passed: bool = True, why: str = "", **figures: Any) -> None:
        self.write(name, "passed" if passed else "failed", why, **figures)

    def write(self, name: str, status: str, why: str = "", **figures: Any) -> None:
        self.failed |= status == "failed"
        print(f"{name}: {status} {why}")
        line: Line = {"part": self.part, "case": name, "status": status}
        append(self.path, line | ({"why": why} if why else {}) | ({"figures": figures} if figures else {}))
