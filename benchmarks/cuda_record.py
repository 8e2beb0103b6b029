"""Writes the cases of a part of `benchmarks/cuda.sh` as they come: one that is cut off leaves what it found."""

import importlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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

    def command(
        self,
        command: Sequence[str],
        until: Callable[[], bool] = lambda: False,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run it to its end, or until something holds and it is killed with all that it started.

        Args:
            environment: variables beside those of this process.

        Returns:
            why it failed; "" if it did not, or was killed.
        """
        log = self.path.parent / LOG
        start = log.stat().st_size if log.exists() else 0
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(environment or {})})
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


def beside(name: str, measured: float, predicted: float) -> Line:
    """Figures of a case: what was measured, what was predicted, and the ratio."""
    return {name: measured, f"predicted_{name}": predicted, f"{name}_of_predicted": measured / predicted}


def environment_of_one_rank() -> dict[str, str]:
    """Variables with which train.py is the only rank of a job, as a launcher would set them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rank = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    rank |= {"MASTER_ADDR": "127.0.0.1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return {name: str(value) for name, value in rank.items()}


class Cases:
    """A pytest plugin that records each test when it ends.

    After an error of CUDA itself the process is lost, and what follows would fail as well: it stops.
    """

    def __init__(self, record: Record) -> None:
        self.record, self.left = record, set[str]()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """In a rehearsal, tests for a GPU run on the CPU in fp64."""
        chosen = [item.callspec.params for item in items if self.record.rehearsal and hasattr(item, "callspec")]
        for parameters in chosen:
            if parameters.get("device") == "cuda":
                parameters["device"] = "cpu"
                if "dtype" in parameters:
                    parameters["dtype"] = importlib.import_module("torch").float64

    def pytest_collection_finish(self, session: Any) -> None:
        self.session, self.left = session, {item.nodeid for item in session.items}
        self.record.case("chosen", bool(self.left), tests=len(self.left))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.record.case(report.nodeid, False, _last_error(report))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not (report.when == "call" or report.failed or report.skipped):
            return
        self.left.discard(report.nodeid)
        status = "not run" if report.skipped else report.outcome
        self.record.write(report.nodeid.partition("::")[2], status, _last_error(report) if report.failed else "")
        if report.failed and "CUDA error" in str(report.longrepr):
            self.session.shouldstop = "an error of CUDA itself"

    def pytest_sessionfinish(self) -> None:
        if self.left:
            self.record.write(f"{len(self.left)} tests", "not run", "the tests stopped before them")


def _last_error(report: Any) -> str:
    lines = [line.strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return " ".join((lines or str(report.longrepr).splitlines()[-1:])[-2:])[:300]


def run_tests(
    record: Record, file: str, keyword: str, marker: str = "cuda", conftest: Sequence[str] = ("--noconftest",)
) -> None:
    """Run the tests of a file that a keyword expression chooses.

    By default without the suite's conftest, which imports all packages of the trainer.
    """
    plugin = Cases(record)
    options = [*conftest, "-p", "no:cacheprovider", "-o", "addopts=", "-q", "-m", marker, "-k", keyword]
    code = importlib.import_module("pytest").main([file, *options], plugins=[plugin])
    if code not in (0, 1, 5):  # 5: nothing was chosen, which is recorded
        record.case(f"pytest {file} -k {keyword!r}", False, f"exit code {int(code)}")
