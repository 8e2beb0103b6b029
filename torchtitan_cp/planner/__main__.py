"""`python -m torchtitan_cp.planner CONFIG` says what a config takes before it is run."""

import argparse
import sys

from rich.console import Console

from models import ARCHITECTURES
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import UserError, load_config
from torchtitan_cp.planner.devices import ACCELERATORS, Cluster, make_cluster
from torchtitan_cp.planner.plan import plan_config
from torchtitan_cp.planner.report import print_estimates
from torchtitan_cp.registry import register

BAD_INPUT, DOES_NOT_FIT = 2, 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_cp.planner",
        description="Memory, messages and time of each stage of a config on a cluster, without running it. "
        "Any key can be overridden: --section.key=value. Exit code 1: a stage does not fit.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file")
    parser.add_argument("--device", default="h100-80g", choices=list(ACCELERATORS))
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="default: the device's usual node")
    parser.add_argument("--intra-bandwidth", type=float, default=0.0, help="GB/s a rank sends inside a node")
    parser.add_argument("--inter-bandwidth", type=float, default=0.0, help="GB/s a rank sends to other nodes")
    options, overrides = parser.parse_known_args(arguments)
    register(ARCHITECTURES)
    console = Console(width=200 if not sys.stdout.isatty() else None, highlight=False)
    try:
        config = load_config(options.config, overrides)
        estimates = plan_config(config, cluster_of(options))
    except (UserError, ContextParallelError) as error:
        print(f"error: {options.config}: {error}", file=sys.stderr)
        return BAD_INPUT
    print_estimates(console, estimates, cluster_of(options))
    return 0 if all(estimate.fits for estimate in estimates) else DOES_NOT_FIT


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the command line describes."""
    return make_cluster(
        options.device,
        options.nodes,
        options.gpus_per_node,
        options.intra_bandwidth * 1e9,
        options.inter_bandwidth * 1e9,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
