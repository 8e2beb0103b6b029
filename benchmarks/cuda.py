"""Runs the parts of `benchmarks/cuda.sh`, each as a process with a limit of time, and says what came of each.

Imports the standard library alone: importing torch may hang or fail as well, and then is a part's failure. What the
parts do is in cuda_parts.py, cuda_ranks.py, cuda_rates.py, cuda_steps.py and cuda_training.py.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, SUMMARY, LOG = "results.jsonl", "summary.md", "log.txt"
CASES_FAILED = 4  # exit code of a part that ran to its end
LAST_LINES, LAST_BYTES, MAX_FAILURES = 12, 20_000, 30
ENDED = ("passed", "failed", "crashed", "stopped at its limit")
KILL_SECONDS, REHEARSAL_FACTOR = 10.0, 3
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Line = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A process of its own, which runs the function of its name.

    Attributes:
        module: of benchmarks/, which has the function.
        gpus: it needs so many.
        may_share: with --share-gpu its ranks take turns on one.
    """

    name: str
    limit_seconds: int
    about: str
    module: str = "cuda_parts"
    gpus: int = 1
    may_share: bool = False


RANKS, TRAINING, RATES, STEPS = "cuda_ranks", "cuda_training", "cuda_rates", "cuda_steps"
# Speed first: what the goal of half a GPU's peak depends on, in 25 minutes, the first four parts in one call of ten.
# Then what was shown before and may have broken.
PARTS = (
    Part("versions", 40, "driver, torch, cuDNN, NCCL, compiler and packages"),
    Part("kernels", 240, "attention kernels by themselves: causal, documents, windows; head dims 128 and 64", RATES),
    Part("rates", 60, "matrix products of the 8B's sizes, device memory, copies to the host", RATES),
    Part("layers", 240, "the 8B's layers, compiled, at 4 x 8K and 32K, by what is recomputed", STEPS),
    Part("long", 240, "the 8B's layers, compiled, at 128K and 512K", STEPS),
    Part("packed", 150, "the 8B's layers on packed documents; no step takes twice the time of most", STEPS),
    Part("published", 300, "models and lengths of which others published tokens/s on one H100", STEPS),
    Part("mixed", 150, "a hybrid with recurrent layers and a mixture of experts, at 32K", STEPS),
    Part("profile", 80, "a step of the 8B's layers by kinds of kernels, its copies by name", STEPS),
    Part("parity", 240, "--verify-parity on NCCL, by exchange and kind of parallelism; doctor", RANKS, 2, True),
    Part("conformance", 180, "attention on NCCL against fp64: exchanges, layouts, masks", RANKS, 2, True),
    Part("faults", 300, "on NCCL: a rank is killed or stopped and losses are equal; a NaN is found", RANKS, 2, True),
    Part("overlap", 120, "a profiled step: keys and values in flight beside compute", RANKS, 2),
    Part("flash", 40, "tests of the flash kernel"),
    Part("efficient", 40, "tests of the efficient kernel, which fp32 uses"),
    Part("cudnn", 60, "tests of the cuDNN kernel in bf16; few shapes, as each is a plan to build"),
    Part("linear", 60, "gated delta rules in torch against fp64, then fused kernels where they are installed"),
    Part("options", 150, "four steps of tiny models with each option that a GPU changes, beside fp32", TRAINING),
    Part("stdlib", 180, "stdlib_on_cpu.toml in fp32, and in bf16 killed and resumed with equal losses", TRAINING),
    Part("waits", 40, "steps of tiny models, in which the host waits for the GPU nowhere", TRAINING),
    Part("offload", 45, "tests of activations that go to host memory"),
    Part("families", 50, "some models of transformers beside their own attention"),
    Part("shares", 120, "tiles of a ring's plan beside one call of cuDNN, by keys a rank"),
    Part("flex", 50, "tests of the flex kernel, which Triton compiles"),
)


def append(path: Path, line: Line) -> None:
    """Write a line of JSON that is on the disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps({"time": time.strftime("%H:%M:%S", time.gmtime()), **line}, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Line]:
    """The lines that are whole."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines


# Processes -----------------------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Become the parent of what a dead child leaves: ranks are in sessions of their own, out of a group's reach."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def find_rank(ancestor: int, rank: int) -> int | None:
    """Process id of a rank of the job that a process started; None while it does not run."""
    for pid in _descendants(ancestor):
        with suppress(OSError):
            names = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in names and b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def kill_descendants(ancestor: int) -> None:
    """Kill all that a process started, directly or not, in whatever group or session; not the process itself.

    Gives up on what outlives SIGKILL for some seconds, as a process inside a driver can.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while (found := _descendants(ancestor)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _descendants(ancestor: int) -> list[int]:
    """Zombies left out."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            parents[int(path.parent.name)] = int(parent) if state != "Z" else -1
    found = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {ancestor})


class Interrupted(Exception):
    """A signal asks to stop."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    for other in STOP:  # one is enough
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(signal.Signals(number).name)


def run_part(part: Part, command: Sequence[str], out: Path, limit_seconds: float) -> None:
    """Run a part to its end or its limit, kill what it leaves, and write what came of it."""
    begun, results = time.monotonic(), out / RESULTS
    append(results, {"part": part.name, "status": "started", "limit": limit_seconds})
    end: Line = {"part": part.name, "status": "interrupted"}
    with (out / LOG).open("ab") as log:
        log.write(f"\n=== {part.name}\n".encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
        )
        try:
            end |= outcome(process.wait(limit_seconds))
        except subprocess.TimeoutExpired:
            end |= {"status": "stopped at its limit"}
        except Interrupted as stop:
            end |= {"why": str(stop)}
            raise
        finally:
            kill_descendants(os.getpid())
            end |= {"seconds": round(time.monotonic() - begun, 1), "limit": limit_seconds}
            if end["status"] not in ("passed", "failed"):
                end |= {"last_lines": last_lines(out / LOG, start)}
            append(results, end)


def outcome(code: int) -> Line:
    """What an exit code says."""
    if code < 0:
        return {"status": "crashed", "why": f"killed by {signal.Signals(-code).name}"}
    if code in (0, CASES_FAILED):
        return {"status": "failed" if code else "passed"}
    return {"status": "crashed", "why": f"exit code {code}"}


def last_lines(log: Path, start: int) -> list[str]:
    """Of what was logged from a place on."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - LAST_BYTES))
        return file.read().decode(errors="replace").rstrip().splitlines()[-LAST_LINES:]


# What came of it -----------------------------------------------------------------------------------------------


def outcomes(lines: Sequence[Line]) -> dict[str, Line]:
    """The last line about each part as a whole."""
    return {line["part"]: line for line in lines if "case" not in line}


def last_run(lines: Sequence[Line], part: str) -> list[Line]:
    """The cases of a part since it was last started."""
    cases: list[Line] = []
    for line in lines:
        if line["part"] == part:
            cases = [] if line.get("status") == "started" else [*cases, line]
    return [line for line in cases if "case" in line]


def summarize(lines: Sequence[Line]) -> str:
    """Markdown: a line for each part, then what did not run, what failed, and the figures."""
    ends = outcomes(lines)
    text = ["| part | outcome | seconds | limit | passed | failed | not run |", "|---|---|---|---|---|---|---|"]
    absent, parts, failures, logs, tables = [], [], [], [], []
    for part in PARTS:
        end, cases = ends.get(part.name, {"status": "did not run"}), last_run(lines, part.name)
        status = "cut off" if end["status"] == "started" else end["status"]
        count = {name: sum(case["status"] == name for case in cases) for name in ("passed", "failed", "not run")}
        figures = (end.get("seconds", "-"), end.get("limit", part.limit_seconds), *count.values())
        text.append(f"| {part.name} | {' | '.join(map(str, (status, *figures)))} |")
        if status not in ENDED:
            absent.append(f"{part.name} ({end.get('why', status)})")
        elif status not in ("passed", "failed"):
            last = end.get("last_lines", [])
            missing = [line for line in last if "No module named" in line]
            reason = ", ".join(filter(None, (status, end.get("why"), *missing[-1:])))
            parts.append(f"{part.name}: {reason}")
            logs += ["", f"Last lines of {part.name}:", "", *(f"    {line}" for line in last)]
        failures += [f"{part.name}: {x['case']}: {x.get('why', '')}" for x in cases if x["status"] == "failed"]
        absent += [f"of {part.name}: {x['case']} ({x.get('why', '')})" for x in cases if x["status"] == "not run"]
        tables += _table([case for case in cases if case.get("figures")])
    text += ["", f"Did not run: {', '.join(absent) or 'nothing, all parts ran'}."]
    more = len(failures) - MAX_FAILURES
    failures = [*parts, *failures[:MAX_FAILURES], *[f"... and {more} more cases, in {RESULTS}"] * (more > 0)]
    text += ["", "Failed:", "", *(f"- {failure}" for failure in failures)] if failures else ["", "Failed: nothing."]
    return "\n".join([*text, *tables, *logs]) + "\n"


def _table(cases: Sequence[Line]) -> list[str]:
    """Figures of a part's cases."""
    columns = list(dict.fromkeys(name for case in cases for name in case["figures"]))
    if not columns:
        return []
    rows = [[case["case"], *(_cell(case["figures"].get(name, "-")) for name in columns)] for case in cases]
    head = [cases[0]["part"], *(name.replace("_", " ") for name in columns)]
    return ["", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def main(arguments: Sequence[str]) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="benchmarks/cuda.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help="folder of the results; it is made")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)} (default: all not yet in OUT)")
    parser.add_argument("--list", action="store_true", help="name the parts")
    parser.add_argument("--summary", action="store_true", help="run nothing, and say what OUT holds")
    parser.add_argument("--share-gpu", action="store_true", help="parts for two GPUs too, their ranks in turns on one")
    parser.add_argument("--rehearsal", action="store_true", help="on a CPU, in the smallest sizes, kernels emulated")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="start no part whose limit ends later")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of each part, where it is less than its own")
    parser.add_argument("--python", default=sys.executable, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    if options.list:
        for part in PARTS:
            gpus = ", on two GPUs" * (part.gpus > 1) + " or one that they share" * part.may_share
            print(f"{part.name:<12} {part.limit_seconds:>4} s  {part.about}{gpus}")
        return 0
    if options.out is None:
        parser.error("give the folder OUT")
    if unknown := sorted(set(options.parts) - set(names)):
        parser.error(f"no part is called {', '.join(unknown)}; there are: {', '.join(names)}")
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    code = 0 if options.summary else _run(options, out)
    lines = read(out / RESULTS)
    text = summarize(lines)
    (out / SUMMARY).write_text(text)
    print("\n" + text)
    ends = outcomes(lines)
    seen = max(1, gpus_of(lines))
    wanted = options.parts or [part.name for part in PARTS if gpus_needed(part, options) <= seen]
    return code or int(any(ends.get(name, {}).get("status") != "passed" for name in wanted))


def gpus_of(lines: Sequence[Line]) -> int:
    """How many the versions saw; one where it is not known."""
    seen = [line["figures"]["gpus"] for line in lines if line.get("case") == "torch"]
    return int(seen[-1]) if seen else 1


def limit_of(part: Part, options: argparse.Namespace) -> float:
    """Seconds; a rehearsal is not about speed, and has other work beside it."""
    own = part.limit_seconds * (REHEARSAL_FACTOR if options.rehearsal else 1)
    return min(own, options.limit or own)


def gpus_needed(part: Part, options: argparse.Namespace) -> int:
    return 1 if options.share_gpu and part.may_share else part.gpus


def _run(options: argparse.Namespace, out: Path) -> int:
    """Run the chosen parts. Returns 128 + the signal's number after one, else 0."""
    begun, results = time.monotonic(), out / RESULTS
    for number in STOP:
        signal.signal(number, _interrupt)
    adopt_orphans()
    done = outcomes(read(results))
    chosen = [
        part
        for part in PARTS
        if (part.name in options.parts if options.parts else done.get(part.name, {}).get("status") not in ENDED)
    ]
    # How many GPUs there are decides what else runs.
    if PARTS[0] not in chosen and done.get(PARTS[0].name, {}).get("status") not in ENDED:
        chosen.insert(0, PARTS[0])
    try:
        for part in chosen:
            gpus, limit = gpus_of(read(results)), limit_of(part, options)
            left = (options.within or float("inf")) - (time.monotonic() - begun)
            if part is not PARTS[0] and gpus < gpus_needed(part, options):
                why = f"needs {part.gpus} GPUs, {gpus} seen" if gpus else f"{options.python} sees no CUDA device"
            elif left < limit:
                why = f"no time was left: its limit is {limit:g} s, {left:.0f} were left"
            else:
                print(f"{part.name}: {part.about}", flush=True)
                command = [options.python, "-m", "benchmarks.cuda_parts", part.name, str(results)]
                run_part(part, [*command, *["--rehearsal"] * options.rehearsal], out, limit)
                print(f"    {outcomes(read(results))[part.name]['status']}", flush=True)
                # As parts end, for one who cannot be asked any more.
                (out / SUMMARY).write_text(summarize(read(results)))
                continue
            append(results, {"part": part.name, "status": "not run", "why": why})
    except Interrupted as stop:
        return 128 + signal.Signals[str(stop)]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
