"""The environment that run_train.sh and run_tests.sh make or find."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).parents[2]
# In place of an interpreter: says which torch is there, makes environments of itself, and keeps what pip is asked for.
# DURING: what happens meanwhile, by "venv" or "pip".
STAND_IN = f"""#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; echo venv >>"$ASKED.log"; eval "$DURING_VENV" ;;
    "-m pip")
        if [ "$3" = install ]; then
            while [ "$1" != -c ]; do shift; done
            cat "$2" >"$ASKED"
            echo pip >>"$ASKED.log"
            eval "$DURING_PIP"
        fi ;;
    "-m pytest") echo "$@" ;;
    *importlib.metadata*) if [ -n "$TORCH_THERE" ]; then echo "$TORCH_THERE"; else exit 1; fi ;;
    *fcntl*) exec {sys.executable} "$@" ;;
esac
"""


@dataclass(frozen=True)
class Desk:
    """A machine without an environment, whose python3 is the stand-in.

    Attributes:
        folder: of the environment and of what the stand-in notes.
    """

    folder: Path

    @property
    def asked(self) -> list[str]:
        """What Python was asked for so far, venv or pip."""
        return (self.folder / "asked.log").read_text().split()

    def start(self, **during: str) -> subprocess.Popen[str]:
        """Begin a start, with something that happens while venv or pip works."""
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "VENV": str(self.folder / "venv"),
            "ROOT": str(ROOT),
            "ASKED": str(self.folder / "asked"),
            "TORCH_THERE": "2.99.0",
            **during,
        }
        command = ["bash", "-c", "set -euo pipefail; . launch/environment.sh; echo ready"]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore Ctrl-C
        )


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "python3").write_text(STAND_IN)
    (tmp_path / "python3").chmod(0o755)
    return Desk(tmp_path)


@pytest.mark.parametrize(
    ("made_before", "there", "pinned"),
    [
        (False, "2.99.0", None),
        (True, "2.99.0+cu130", "2.99.0+cu130"),
        (True, "", None),
    ],
)
def test_an_environment_that_was_there_keeps_its_torch(
    tmp_path: Path, made_before: bool, there: str, pinned: str | None
) -> None:
    venv, asked = tmp_path / "venv", tmp_path / "asked"
    stand_in = (venv / "bin" / "python") if made_before else tmp_path / "python3"
    stand_in.parent.mkdir(parents=True, exist_ok=True)
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "VENV": str(venv),
        "ROOT": str(ROOT),
        "ASKED": str(asked),
        "TORCH_THERE": there,
    }
    for _ in range(2):  # a second time, the environment is there and still ours or another's
        (venv / ".torchtitan-cp-base").unlink(missing_ok=True)
        subprocess.run(["bash", "-c", ". launch/environment.sh"], cwd=ROOT, env=environment, check=True)
        pins = asked.read_text().split()
        ours = [line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch==")]
        assert [pin for pin in pins if pin.startswith("torch==")] == ([f"torch=={pinned}"] if pinned else ours)
        assert any(pin.startswith("setuptools==") for pin in pins) == (pinned is None)
        assert any(pin.startswith("numpy==") for pin in pins)


def read_until(process: subprocess.Popen[str], line: str) -> None:
    """Read what a start prints up to a line that it must print."""
    assert process.stdout
    said = list[str]()
    while line not in said:
        said.append(process.stdout.readline().rstrip("\n"))
        assert said[-1], said


def start_that_waits(desk: Desk) -> subprocess.Popen[str]:
    """Begin a start, and read what it prints until it waits for another."""
    process = desk.start()
    read_until(process, f"waiting for another start, which is setting up {desk.folder}/venv")
    return process


def test_of_two_starts_at_once_one_waits_and_then_has_nothing_to_install(desk: Desk) -> None:
    first = desk.start(DURING_PIP=f"echo installing; until [ -e {desk.folder}/go ]; do sleep 0.05; done")
    read_until(first, "installing")
    second = start_that_waits(desk)
    (desk.folder / "go").touch()
    assert first.communicate()[0] == second.communicate()[0] == "ready\n"
    assert (first.returncode, second.returncode) == (0, 0)
    assert desk.asked == ["venv", "pip"]


def test_a_start_waits_for_the_pip_of_one_that_was_killed(desk: Desk) -> None:
    first = desk.start(DURING_PIP=f"kill -9 $PPID; echo alone; until [ -e {desk.folder}/go ]; do sleep 0.05; done")
    read_until(first, "alone")
    second = start_that_waits(desk)
    (desk.folder / "go").touch()
    assert "installing pinned requirements" in second.communicate()[0]
    first.communicate()
    assert desk.asked == ["venv", "pip", "pip"]


@pytest.mark.parametrize(
    ("during", "asked"),
    [("DURING_VENV", ["venv", "venv", "pip"]), ("DURING_PIP", ["venv", "pip", "pip"])],
)
@pytest.mark.parametrize(("signal", "code"), [("INT", 130), ("KILL", -9)])
def test_the_start_after_one_that_was_ended_halfway_makes_what_is_missing(
    desk: Desk, during: str, asked: list[str], signal: str, code: int
) -> None:
    first = desk.start(**{during: f"kill -{signal} $PPID; exit 1"})
    said = first.communicate()[0]
    assert first.returncode == code, said
    if signal == "INT":
        assert said.splitlines()[-1] == f"interrupted; the next start completes {desk.folder}/venv"
        assert "error" not in said
    second = desk.start()
    said = second.communicate()[0]
    assert second.returncode == 0, said
    assert "waiting" not in said
    assert "installing pinned requirements" in said
    assert "keeping its PyTorch" not in said, "it is ours"
    assert desk.asked == asked


def test_an_environment_that_cannot_be_written_is_named(desk: Desk) -> None:
    (desk.folder / "venv").touch()
    said = desk.start().communicate()[0]
    assert said == f"error: cannot write to {desk.folder}/venv; set VENV to a folder of your own\n"


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], "-m not deep -n 2 --dist loadgroup"),
        (["--deep", "tests/jobs"], "-m deep or not deep -n 2 --dist loadgroup tests/jobs"),
        (
            ["tests/unit", "-k", "ring and not window"],
            "-m not deep -n 2 --dist loadgroup tests/unit -k ring and not window",
        ),
    ],
)
def test_run_tests_leaves_out_what_is_deep_unless_told_and_passes_other_arguments_on(
    tmp_path: Path, arguments: list[str], passed: str
) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = {
        "PATH": os.environ["PATH"],
        "VENV": str(tmp_path / "venv"),
        "ASKED": str(tmp_path / "asked"),
        "TORCH_THERE": "2.99.0",
    }
    done = subprocess.run(
        [str(ROOT / "run_tests.sh"), *arguments], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == f"-m pytest {passed}"
