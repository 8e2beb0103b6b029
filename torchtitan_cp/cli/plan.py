"""`torchtitan-cp plan CONFIG` estimates memory, messages and time of a config without running it."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from torchtitan_cp.cli.command import run_command
from torchtitan_cp.cli.options import (
    add_rank_arguments,
    at_least,
    config_parser,
    default_ranks,
    numbers,
    parse_with_overrides,
)
from torchtitan_cp.config import Config, ConfigError, load_config, to_toml
from torchtitan_cp.config.check import check_stages
from torchtitan_cp.planner.devices import ACCELERATORS, Cluster, make_cluster
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.planner.fits import print_fits, search_each
from torchtitan_cp.planner.measure import measure_accelerator
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.planner.report import print_estimates
from torchtitan_cp.planner.search import search
from torchtitan_cp.planner.search_report import nothing_fits, reasons
from torchtitan_cp.runtime.device import find_device
from torchtitan_cp.training.resolve import with_defaults

HERE = "here"


def main(arguments: list[str]) -> int:
    parser = config_parser(
        "plan",
        "Memory, messages and time of each stage of a config on a cluster, without running it. Exit code 1: a stage "
        "does not fit.",
    )
    parser.add_argument(
        "--device",
        default="h100-80g",
        choices=[*ACCELERATORS, HERE],
        help="default h100-80g; here: this machine's, measured in a few seconds",
    )
    add_rank_arguments(
        parser,
        "a node of the device, with its usual number of GPUs; here: what run_train.sh would use; several numbers with "
        "--search, e.g. 1,2,4,8: a line for each of them",
        numbers(at_least(1)),
        "N[,N...]",
    )
    parser.add_argument(
        "--host-memory", type=at_least(0, float), default=0.0, help="GB a node has (default: 250 for each of its GPUs)"
    )
    parser.add_argument(
        "--intra-bandwidth", type=at_least(0, float), default=0.0, help="GB/s a rank sends inside a node"
    )
    parser.add_argument(
        "--inter-bandwidth", type=at_least(0, float), default=0.0, help="GB/s a rank sends to other nodes"
    )
    parser.add_argument("--search", action="store_true", help="find the fastest degrees and modes that fit")
    parser.add_argument(
        "--write", type=Path, metavar="TOML", help="with --search: write the config it finds to a new file"
    )
    options, overrides = parse_with_overrides(parser, arguments)
    if options.write and not options.search:
        parser.error("--write writes what --search finds; give both")
    if options.ranks and len(options.ranks) > 1 and (options.write or not options.search):
        parser.error("several numbers of --ranks are for --search without --write")
    return run_command(lambda: _plan(load_config(options.config, overrides), options), options.config)


def _plan(config: Config, options: argparse.Namespace) -> int:
    """Print the estimates of a config, or of the one that a search finds. Returns the exit code."""
    console = Console(width=200 if not sys.stdout.isatty() else None, highlight=False, markup=False)
    check_stages(config)
    cluster, *others = (_cluster_of(options, config, ranks) for ranks in options.ranks or [0])
    if others:
        return int(not print_fits(console, search_each(config, [cluster, *others])))
    if options.search:
        result = search(config, cluster)
        if not result.found:
            raise nothing_fits(result)
        console.print(*reasons(result), sep="\n")
        config = result.found_config()
    estimates = plan_config(config, cluster)
    print_estimates(console, estimates)
    if options.write:
        text = f"# Found by the planner for {cluster.ranks} x {cluster.name}.\n# Ranks: {cluster.ranks}\n"
        text += to_toml(with_defaults(config))
        try:
            with options.write.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            problem = f"--write {options.write}: {error.strerror}"
            raise ConfigError(problem, fix="give the path of a new file") from None
        console.print(f"written: {options.write}")
    return int(not all(estimate.fits for estimate in estimates))


def _cluster_of(options: argparse.Namespace, config: Config, ranks: int) -> Cluster:
    """The cluster that the options describe.

    Args:
        ranks: of the job; 0: as many as its nodes have.
    """
    here = options.device == HERE
    usual = options.gpus_per_node or (default_ranks() if here else ACCELERATORS[options.device].ranks_per_node)
    is_cpu = (find_device().device.type if here else options.device) == "cpu"
    of_node = min(usual, ranks or usual)  # fewer ranks than a node has are a part of one
    if is_cpu and ranks and not options.gpus_per_node:
        of_node = ranks  # a CPU takes any number
    nodes, left = divmod(ranks or of_node * (options.nodes or 1), of_node)
    if left:
        raise ConfigError(
            f"--ranks {ranks} are no whole nodes of {of_node} ranks",
            fix=f"use a multiple of {of_node}, or say what a node has: --gpus-per-node",
        )
    measured = measure_accelerator(config, sized_model_args(config), of_node) if here else None
    given = {
        "link_bandwidth": options.intra_bandwidth * 1e9,
        "network_bandwidth": options.inter_bandwidth * 1e9,
        "host_bytes": options.host_memory * 1e9,
    }
    return make_cluster(options.device, nodes, measured, ranks_per_node=of_node, **given)
