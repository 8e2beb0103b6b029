"""benchmarks/cuda.sh: the order of its parts, their limits, what it writes and says, and a rehearsal of all of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cuda import PARTS, RESULTS, summarize
from benchmarks.cuda_ranks import beside_compute
from tests.support.forked_python import forked_python

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "cuda.sh"
ONE_GPU = [part.name for part in PARTS if part.gpus == 1]

# Stands for the interpreter of the parts, which it is not asked to run: it does at once what a part is to do in a test.
INTERPRETER = """#!{python} -S
import json, os, subprocess, sys, time
module, part, results = sys.argv[2:5]
if module == "benchmarks.cuda":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
def case(name, status, **figures):
    with open(results, "a") as file:
        file.write(json.dumps(dict(part=part, case=name, status=status, figures=figures)) + chr(10))
print("first words of", part, flush=True)
if part == "versions":
    case("torch", "passed", gpus={gpus})
case("one", "passed", tokens_per_second=1234.5)
if part in {hang!r}:
    # As a launcher's ranks do, out of reach of the process group.
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open({folder!r} + "/pids", "a") as file:
        file.write(f"{{os.getpid()}} {{child.pid}} ")
    time.sleep(600)
if part == "efficient":
    raise ModuleNotFoundError("No module named 'rich'")
if part == "cudnn":
    os.kill(os.getpid(), 9)
if part == "offload":
    case("two", "failed")
    sys.exit(4)
"""


def interpreter(folder: Path, gpus: int = 1, hang: tuple[str, ...] = ("flash",)) -> str:
    path = folder / "python"
    path.write_text(INTERPRETER.format(python=sys.executable, gpus=gpus, hang=hang, folder=str(folder)))
    path.chmod(0o755)
    return str(path)


def command(python: str, folder: Path, *options: str) -> dict[str, Any]:
    return {
        "args": [str(SCRIPT), str(folder / "out"), *options],
        "env": {**os.environ, "PYTHON": python},
        "stdout": subprocess.PIPE,
        "text": True,
    }


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / RESULTS).read_text().splitlines()]


def is_gone(pid: int) -> bool:
    """Whether a process ended, or does so now: a killed one may first wait for a core."""
    status, waited = Path(f"/proc/{pid}/status"), time.monotonic() + 10
    with suppress(FileNotFoundError):
        while "State:\tZ" not in status.read_text() and time.monotonic() < waited:
            time.sleep(0.01)
        return "State:\tZ" in status.read_text()
    return True


def test_a_part_that_hangs_and_one_that_crashes_are_said_and_the_others_run(tmp_path: Path) -> None:
    done = subprocess.run(**command(interpreter(tmp_path), tmp_path, "--limit", "2"), check=False)
    assert done.returncode == 1
    lines = lines_of(tmp_path)
    assert [line["part"] for line in lines if line["status"] == "started"] == ONE_GPU
    ends = {line["part"]: line for line in lines if "case" not in line}
    assert ends["flash"]["status"] == "stopped at its limit"
    assert 2 <= ends["flash"]["seconds"] < 8
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert ends["efficient"]["status"] == "crashed"
    assert ends["cudnn"] | {"why": "killed by SIGKILL", "last_lines": ["first words of cudnn"]} == ends["cudnn"]
    assert ends["offload"]["status"] == "failed"
    assert {ends[name]["status"] for name in ("versions", "stdlib", "shares", "layers", "flex")} == {"passed"}
    assert "| flash | stopped at its limit | 2" in done.stdout
    assert "| stdlib | passed | " in done.stdout
    assert "efficient: crashed, exit code 1, ModuleNotFoundError: No module named 'rich'" in done.stdout
    assert "- cudnn: crashed, killed by SIGKILL\n" in done.stdout
    assert "Last lines of cudnn:\n\n    first words of cudnn\n" in done.stdout
    assert "offload: two: " in done.stdout
    absent = ", ".join(f"{part.name} (needs 2 GPUs, 1 seen)" for part in PARTS if part.gpus > 1)
    assert f"Did not run: {absent}." in done.stdout
    assert "| shares | tokens per second |\n| --- | --- |\n| one | 1,234 |" in done.stdout
    assert (tmp_path / "out" / "summary.md").read_text() in done.stdout


def test_an_interrupted_run_says_what_did_not_run_and_goes_on_from_there(tmp_path: Path) -> None:
    with subprocess.Popen(**command(interpreter(tmp_path, hang=("kernels",)), tmp_path)) as process:
        while not (tmp_path / "pids").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert "kernels (SIGTERM), rates (did not run), layers (did not run)" in said
    assert "| versions | passed | " in said
    # A part is left out for which no time is left; named ones run again.
    again = command(interpreter(tmp_path, hang=()), tmp_path, "--within", "99")
    subprocess.run(**again, check=False)
    started = [line["part"] for line in lines_of(tmp_path) if line["status"] == "started"]
    fitting = ["rates", "profile", "flash", "efficient", "cudnn", "linear", "waits", "offload", "families", "flex"]
    assert started == ["versions", "kernels", *fitting]
    told = subprocess.run(**command(sys.executable, tmp_path, "--summary"), check=False).stdout
    assert "stdlib (no time was left: its limit is 180 s, " in told
    subprocess.run(**command(interpreter(tmp_path), tmp_path, "versions", "layers"), check=False)
    assert [line["part"] for line in lines_of(tmp_path) if line["status"] == "started"][12:] == ["versions", "layers"]


def test_on_one_gpu_parts_for_two_run_where_their_ranks_may_share_it(tmp_path: Path) -> None:
    done = subprocess.run(**command(interpreter(tmp_path, 1, ()), tmp_path, "--share-gpu"), check=False)
    assert [line["part"] for line in lines_of(tmp_path) if line["status"] == "started"] == [
        part.name for part in PARTS if part.gpus == 1 or part.may_share
    ]
    assert "Did not run: overlap (needs 2 GPUs, 1 seen)." in done.stdout


def test_two_gpus_run_all_parts_and_no_gpu_runs_nothing(tmp_path: Path) -> None:
    subprocess.run(**command(interpreter(tmp_path, 2, ()), tmp_path), check=False)
    assert [line["part"] for line in lines_of(tmp_path) if line["status"] == "started"] == [x.name for x in PARTS]
    none = tmp_path / "none"
    none.mkdir()
    done = subprocess.run(**command(interpreter(none, 0), none), check=False)
    assert done.returncode == 1
    assert [line["part"] for line in lines_of(none) if line["status"] == "started"] == ["versions"]
    assert "sees no CUDA device" in done.stdout


def test_a_line_that_was_cut_and_a_part_that_was_killed_with_its_driver_are_not_lost(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    rows = [{"part": "flash", "status": "started"}, {"part": "flash", "case": "one", "status": "passed"}]
    (out / RESULTS).write_text("\n".join(map(json.dumps, rows)) + '\n{"part": "fla')
    said = subprocess.run(**command(sys.executable, tmp_path, "--summary"), check=False).stdout
    assert "| flash | cut off | - | 40 | 1 | 0 | 0 |" in said


def test_the_parts_about_speed_come_first_and_fit_25_minutes_the_first_four_in_a_call_of_ten() -> None:
    limits = [part.limit_seconds for part in PARTS]
    speed = ONE_GPU.index("profile") + 1
    assert ONE_GPU[:speed] == [part.name for part in PARTS[:speed]]
    assert sum(limits[:speed]) <= 1500
    assert sum(limits[:4]) <= 580
    assert sum(part.limit_seconds for part in PARTS if part.gpus == 1) <= 1500 + 900


def test_keys_in_flight_are_counted_beside_compute_and_weights_are_not() -> None:
    spans = [
        ("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0, 10),
        ("kernel", "pytorch_flash::flash_fwd_kernel", 4, 5),
        ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 4),
        ("kernel", "cutlass_gemm", 8, 7),
        ("cpu_op", "aten::mm", 0, 100),
    ]
    events = [{"cat": cat, "name": name, "ts": start * 1e6, "dur": length * 1e6} for cat, name, start, length in spans]
    events.append({"name": "process_name", "ph": "M"})
    assert beside_compute(events) == {"compute": 11.0, "in_flight": 10.0, "in_flight_beside_compute": 6.0}


def test_a_summary_of_nothing_names_every_part() -> None:
    assert all(f"| {part.name} | did not run |" in summarize([]) for part in PARTS)


@pytest.mark.deep
@pytest.mark.jobs
@pytest.mark.xdist_group("jobs/test_page_runs.py")  # takes minutes: at the end, the other worker would have none
def test_every_part_runs_on_a_cpu_with_emulated_kernels(tmp_path: Path) -> None:
    program = tmp_path / "parts"
    with forked_python(tmp_path) as python:
        # The parts that kill ranks need them to be their own, as they are below a new Python.
        program.write_text(
            f'#!/bin/sh\ncase "$3" in stdlib|faults) exec {sys.executable} "$@"; esac\nexec {python} "$@"\n'
        )
        program.chmod(0o755)
        done = subprocess.run(**command(str(program), tmp_path, "--rehearsal"), check=False)
    log = (tmp_path / "out" / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log[-5000:]
    (absent,) = re.findall("^Did not run: (.*)\\.$", done.stdout, re.MULTILINE)
    # Without a GPU there is no driver, and a kernel's package may be missing.
    allowed = r"of versions: driver \(.*?nvidia-smi'\)|of kernels: flash4[^()]*\([^()]*\)"
    assert re.fullmatch(rf"nothing, all parts ran|(({allowed})(, )?)+", absent)
    assert "Failed: nothing." in done.stdout
