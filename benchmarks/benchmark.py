"""What every benchmark shares: its options, the table it prints, and a JSON file that says where it was made."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "numpy", "transformers", "torchao", "ring-attention-pytorch", "yunchang", "torchtitan")


@dataclass(frozen=True)
class Benchmark:
    """A measurement with options.

    Attributes:
        measure: takes the options by name, and yields rows: column -> value, with units in the columns' names.
        options: name -> default; a list takes several values of its first one's type.
        quick: name -> value with --quick.
        choices: name -> what there is to choose from.
    """

    measure: Callable[..., Iterator[Row]]
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def parser(self, name: str, about: str, quick: bool) -> argparse.ArgumentParser:
        """Reads this benchmark's options."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks {name}",
            description=f"{about}\n\n{self.measure.__doc__ or ''}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option, standard in self.options.items():
            default = self.quick.get(option, standard) if quick else standard
            several = isinstance(standard, list)
            parser.add_argument(
                "--" + option.replace("_", "-"),
                type=type(standard[0] if several else standard),
                nargs="+" if several else None,
                default=default,
                choices=self.choices.get(option),
                help=f"default: {' '.join(map(str, default)) if several else default}".replace("%", "%%"),
            )
        return parser


def run(
    name: str, about: str, benchmark: Benchmark, options: dict[str, Any], console: Console, path: Path | None
) -> None:
    """Measure, print the table as it grows (at its end where it goes to a file), and write the file after each row."""
    facts = machine()
    settings = ", ".join(f"{key} {_cell(value)}" for key, value in options.items())
    console.print(f"\n{name}: {about}\n{facts['processor']}, torch {torch.__version__}; {settings}\n")
    rows: list[Row] = []
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        for row in benchmark.measure(**options):
            rows.append(row)
            live.update(table_of(rows), refresh=True)
            if path:
                write(path, name, {"options": options, "rows": rows}, facts)


def table_of(rows: Sequence[Row]) -> Table:
    """Rows as a table that is Markdown too; a column that a row does not have is a dash."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(*(column.replace("_", " ") for column in columns), box=box.MARKDOWN)
    for row in rows:
        table.add_row(*(_cell(row[column]) if column in row else "-" for column in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if type(value) is int else str(value)


def refusal(path: Path) -> str | None:
    """Why figures cannot be put into this file, or None."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.is_dir():
        return "that is a folder; give a file in it"
    try:
        known = isinstance(json.loads(path.read_text()), dict) if path.exists() else True
    except ValueError:
        known = False
    return None if known else "that file is not one of figures, and is left as it is"


def write(path: Path, name: str, figures: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Put a benchmark's figures into a file that may hold others'."""
    report = json.loads(path.read_text()) if path.exists() else {}
    report[name] = {**facts, **figures}
    path.write_text(json.dumps(report, indent=1, default=str))


def machine() -> dict[str, Any]:
    """Where figures are made: machine and its load, versions, commit."""
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cuda = torch.cuda.is_available()
    versions = {"python": platform.python_version(), "cudnn": torch.backends.cudnn.version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": f"{model or platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "load_before": os.getloadavg()[0],
        "versions": versions,
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len((_git("status", "--porcelain") or "").splitlines()),
    }


def _git(*arguments: str) -> str | None:
    """What git says of this checkout; None where there is none."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
