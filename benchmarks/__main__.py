"""`python -m benchmarks [NAMES] [--quick] [--json OUT]` runs benchmarks one after another."""

import argparse
import importlib
import itertools
import sys
import traceback
from pathlib import Path

from rich.console import Console

from benchmarks.benchmark import refusal, run

# A line for the module of each name, imported when it is asked for: that of the kernels needs torch and rich alone.
BENCHMARKS = {
    "strategies": "every exchange on two one-thread ranks against one process with two threads",
    "packed": "packed documents on two ranks against the ideal time for their mask",
    "peers": "other libraries' context parallelism beside ours, on the same ranks in one run",
    "linear": "linear attention on two one-thread ranks against one process with two threads",
    "hybrids": "a step of transformers' Qwen3.5 beside one of ours, in turns in one process",
    "kernels": "how much of a kernel's single-call rate the tiles of a plan reach",
    "layouts": "keys sent and imbalance of each layout of packed documents, from the plans (nothing runs)",
    "packed_steps": "predicted step time on packed documents, by layout (nothing runs)",
    "plan": "time to work out one rank's plan, from nothing",
    "scale": "where each exchange wins: 8 to 4,096 ranks, 128K to 16M tokens, from the plans (nothing runs)",
    "float8": "what keys and values carried in 8 bits cost in precision and save in bytes",
    "memory": "peak memory of one attention, forward and backward, by context-parallel degree",
    "training_memory": "memory ladder: peak of a training step against its length, by what saves memory",
    "budget": "what a step on one GPU can reach, by length and activation mode (nothing runs)",
    "planned_memory": "what the planner says of memory, beside a dry run on a GPU that is not there, over the options",
    "planner": "what the planner says of memory and time, beside real training steps",
    "end_to_end": "tokens a second of whole training steps by length, beside a plain Hugging Face loop",
    "optimizer": "an optimizer's step by kind",
    "start_up": "from the command to the first optimizer step",
    "checkpoints": "how long training stands still for a checkpoint, and how long one takes to load",
    "monitoring": "what watching a step costs",
    "preparation": "MB of text a second that prepare tokenizes, by kind of corpus and number of processes",
    "loader": "million tokens a second that one process reads, packs and plans",
}


def main(arguments: list[str]) -> int:
    width = max(map(len, BENCHMARKS))
    parser = argparse.ArgumentParser(
        usage="python -m benchmarks [NAMES] [--quick] [--json OUT] [options of the one NAME]",
        description="Run benchmarks one after another, all without NAMES. NAME --help lists a benchmark's own options.",
        epilog="\n".join(f"  {name:<{width}}  {about}" for name, about in BENCHMARKS.items()),
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
    if why := options.json and refusal(options.json):
        parser.error(f"--json {options.json}: {why}")
    failed = [name for name in names or BENCHMARKS if not _runs(name, own, options.quick, options.json)]
    if failed:
        print(f"did not run to the end: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _runs(name: str, own: list[str], quick: bool, path: Path | None) -> bool:
    """Run one; whether it ran to its end."""
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    settings = vars(benchmark.parser(name, BENCHMARKS[name], quick).parse_args(own))
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    try:
        run(name, BENCHMARKS[name], benchmark, settings, console, path)
    except Exception:
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
