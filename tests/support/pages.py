"""The pages that people read, the files of measurements, and the commands in both."""

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
RESULTS = sorted((REPOSITORY / "benchmarks" / "results").glob("*.md"))
PROGRAMS = (
    r"\./run_train\.sh",
    r"sbatch .*\.sh",
    r"python train\.py",
    r"python -m (?:torchtitan_cp\.|benchmarks|models)",
    "torchrun",
    r"torchtitan-cp [a-z]+ \S",
)
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ +)*(?:{'|'.join(PROGRAMS)})")
USAGE = re.compile(r" \[|[ =]\.\.\.")  # "[--quick]", "NPROC=...": how to write one, and none itself


def commands_of(page: str) -> Iterator[str]:
    """Each command on a line of its own, with its continuation lines, and each command in the text."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`]+)`", text):
        whole = " ".join(span.split())
        if COMMAND.match(whole) and not USAGE.search(whole):
            yield whole
    lines = iter(page.splitlines())
    for line in lines:
        whole = line.strip()
        if COMMAND.match(whole):
            while whole.endswith("\\"):
                whole = whole[:-1] + next(lines).strip()
            yield whole


COMMANDS = [
    (f"results/{page.name}" if page in RESULTS else page.name, command)
    for page in [*PAGES, *RESULTS]
    for command in commands_of(page.read_text(encoding="utf-8"))
]

RUN_BY_OTHERS = re.compile(
    r"python -m benchmarks(?!\.)|sbatch|torchtitan-cp (?:train|doctor)|--verify-parity"
    r"|\./run_train\.sh(?!.*--(dry-run|help))"
)
