"""What commands share: arguments, output and imports. It does not import torch."""

import argparse
import gc
import importlib
import io
import logging
import sys
from collections.abc import Callable
from types import ModuleType

from torchtitan_cp.config.errors import format_os_error

LARGEST = 2**62  # torch takes integers of 64 bits


def at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """A `type` for argparse: a finite number that is not below `least`."""

    def read(text: str) -> float:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        if not value <= LARGEST:
            raise argparse.ArgumentTypeError(f"{text} is not a number up to 2^62")
        return value

    read.__name__ = kind.__name__  # what argparse calls it where the text is no number
    return read


def numbers(kind: Callable[[str], object]) -> Callable[[str], list[object]]:
    """A `type` for argparse: numbers with commas between them, each of which `kind` reads."""

    def read(text: str) -> list[object]:
        return [kind(part) for part in text.split(",")]

    read.__name__ = "numbers"
    return read


def config_parser(command: str, about: str) -> argparse.ArgumentParser:
    """The parser of a command that takes a config and overrides of its keys."""
    about = f"{about} Any key can be overridden: --section.key=value"
    parser = argparse.ArgumentParser(prog=f"torchtitan-cp {command}", description=about, allow_abbrev=False)
    parser.add_argument("config", help="TOML file")
    return parser


def default_ranks() -> int:
    """What run_train.sh would use on this node: a rank for each GPU that torch sees, 2 without a GPU. Imports torch."""
    return int(importlib.import_module("torch").cuda.device_count()) or 2


def add_rank_arguments(
    parser: argparse.ArgumentParser,
    default: str = "what run_train.sh would use",
    ranks: Callable[[str], object] | None = None,
    metavar: str = "N",
) -> None:
    """Add --ranks, --nodes and --gpus-per-node, for a command that is about a job and starts none.

    Args:
        default: what --ranks is without it, for the help; ranks, metavar: its type, and how the help shows it.
    """
    size, kind = parser.add_mutually_exclusive_group(), ranks or at_least(1)
    size.add_argument("--ranks", type=kind, metavar=metavar, help=f"of the job, on all nodes (default: {default})")
    size.add_argument("--nodes", type=at_least(1), metavar="N", help="nodes of the job, instead of --ranks")
    parser.add_argument("--gpus-per-node", type=at_least(1), metavar="N", help="ranks of a node")


def ranks_of(options: argparse.Namespace) -> int:
    """Ranks of the job that `add_rank_arguments` describes."""
    return options.ranks or (options.nodes or 1) * (options.gpus_per_node or default_ranks())


def parse_with_overrides(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and all other arguments.

    Overrides are set aside first, because argparse would take one that holds a space as the value of an option.
    """
    overrides = [entry for entry in arguments if entry.startswith("--") and "." in entry.partition("=")[0]]
    options, others = parser.parse_known_args([entry for entry in arguments if entry not in overrides])
    return options, [*others, *overrides]


def escape_unprintable() -> None:
    """Print characters that the encoding of stdout lacks as escapes, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook has another type
        sys.stdout.reconfigure(errors="backslashreplace")


def report_os_errors(work: Callable[[], int]) -> int:
    """Run a command. A failing disk gives one message and exit code 1, because the next try may succeed."""
    try:
        return work()
    except OSError as error:
        print(format_os_error(error), file=sys.stderr)
        logging.getLogger(__name__).debug("raised here:", exc_info=True)
        return 1


def import_without_gc(name: str) -> ModuleType:
    """Import a module by name with garbage collection off, which saves a tenth of the time."""
    gc.disable()
    module = importlib.import_module(name)
    gc.freeze()  # later collections do not scan it
    gc.enable()
    return module
