"""`python -m benchmarks [NAMES] [--quick] [--json OUT]` runs benchmarks one after another."""

import argparse
import itertools
import sys
import traceback
from pathlib import Path

from rich.console import Console

from benchmarks import (
    end_to_end,
    float8,
    kernels,
    loader,
    memory,
    optimizer,
    packed,
    peers,
    plan,
    scale,
    start_up,
    strategies,
    training_memory,
    training_speed,
)
from benchmarks.benchmark import Benchmark, run
from models import ARCHITECTURES
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import UserError
from torchtitan_cp.registry import register

BENCHMARKS: dict[str, Benchmark] = {
    "strategies": strategies.BENCHMARK,
    "packed": packed.BENCHMARK,
    "kernels": kernels.BENCHMARK,
    "float8": float8.BENCHMARK,
    "plan": plan.BENCHMARK,
    "scale": scale.BENCHMARK,
    "memory": memory.BENCHMARK,
    "training_memory": training_memory.BENCHMARK,
    "training_speed": training_speed.BENCHMARK,
    "end_to_end": end_to_end.BENCHMARK,
    "start_up": start_up.BENCHMARK,
    "optimizer": optimizer.BENCHMARK,
    "loader": loader.BENCHMARK,
    "peers": peers.BENCHMARK,
}


def main(arguments: list[str]) -> int:
    width = max(map(len, BENCHMARKS))
    parser = argparse.ArgumentParser(
        usage="python -m benchmarks [NAMES] [--quick] [--json OUT] [options of the one NAME]",
        description="Run benchmarks one after another, all without NAMES. NAME --help lists a benchmark's own options.",
        epilog="\n".join(f"  {name:<{width}}  {benchmark.about}" for name, benchmark in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run, and about how fast")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures into this file")
    parser.add_argument("-h", "--help", action="store_true", help="show this, or the options of NAME")
    options, rest = parser.parse_known_args(arguments)
    names = list(itertools.takewhile(lambda argument: not argument.startswith("-"), rest))
    own = rest[len(names) :]
    if options.help and len(names) != 1:
        parser.print_help()
        return 0
    for name in names:
        if name not in BENCHMARKS:
            parser.error(f"there is no benchmark {name}; there are: {', '.join(BENCHMARKS)}")
    if own and len(names) != 1:
        parser.error(f"{' '.join(own)}: give the one benchmark whose options these are, before them")
    if options.help:
        own = ["--help"]
    register(ARCHITECTURES)
    failed = [name for name in names or BENCHMARKS if not _runs(name, own, options.quick, options.json)]
    if failed:
        print(f"did not run to the end: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _runs(name: str, own: list[str], quick: bool, path: Path | None) -> bool:
    """Run one; whether it ran to its end."""
    benchmark = BENCHMARKS[name]
    settings = vars(benchmark.parser(name, quick).parse_args(own))
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    try:
        run(name, benchmark, settings, console, path)
    except (UserError, ContextParallelError) as error:
        print(f"error: {name}: {error}", file=sys.stderr)
        return False
    except Exception:
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
