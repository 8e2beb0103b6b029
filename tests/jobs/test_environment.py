"""The environment that run_train.sh and run_tests.sh make or find."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).parents[2]
# In place of an interpreter: says which torch is there, makes environments of itself, and keeps what pip is asked for.
STAND_IN = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") while [ "$1" != -c ]; do shift; done; cat "$2" >"$ASKED" ;;
    "-m pytest") echo "$@" ;;
    *importlib.metadata*) if [ -n "$TORCH_THERE" ]; then echo "$TORCH_THERE"; else exit 1; fi ;;
esac
"""


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
