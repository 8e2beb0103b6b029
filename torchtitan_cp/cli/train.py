"""`torchtitan-cp train`, which run_train.sh calls, checks a config and then starts this node's ranks."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType, ModuleType

from torchtitan_cp.cli.options import (
    at_least,
    default_ranks,
    import_without_gc,
    parse_with_overrides,
    report_os_errors,
)
from torchtitan_cp.config import UserError, format_error, load_config
from torchtitan_cp.config.load import OVERRIDE

# It is beside this package, both in a checkout and when installed.
TRAIN = Path(__file__).parents[2] / "train.py"
DRY_RUN_OPTIONS = ("--world-size", "--rank")  # besides --ranks
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def add_comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --verify-parity and --doctor, which the launcher and train.py both take."""
    checks = {
        "--verify-parity": "compare the first step, cut to LENGTH tokens (default 512), with one rank; exit code 5: it "
        "differs",
        "--doctor": "say whether context parallelism is safe for the model, at LENGTH tokens; exit code 5: it is not",
    }
    group = parser.add_mutually_exclusive_group()
    for flag, purpose in checks.items():
        group.add_argument(
            flag, nargs="?", const=0, type=at_least(0), metavar="LENGTH", help=f"train nothing: {purpose}"
        )


def load_launcher(check: list[str], stopped_code: int = 0) -> ModuleType:
    """Import the module that starts ranks, which takes as long as torch, while another process checks the config.

    Args:
        check: command that checks the config and prints what is wrong with it.
        stopped_code: exit code after a scheduler's signal.

    Raises:
        SystemExit: the config would not run, or a signal came first.
    """
    check_process: subprocess.Popen[bytes] | None = None

    def exit_before_start(number: int, frame: FrameType | None) -> None:
        if check_process:
            check_process.kill()
        print(f"{signal.Signals(number).name}: no rank was started", file=sys.stderr, flush=True)
        os._exit(128 + number if number == signal.SIGINT else stopped_code)  # an import may swallow any exception

    for number in SIGNALS:
        signal.signal(number, exit_before_start)
    # torch logs each lost connection as a warning with forty lines of C++ frames, here and on ranks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A new session keeps the terminal's Ctrl-C from it.
    check_process = subprocess.Popen(check, start_new_session=True)
    try:
        launcher = import_without_gc("torchtitan_cp.runtime.launcher")
        if code := check_process.wait():
            sys.exit(code)
    finally:
        check_process.kill()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return launcher


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="torchtitan-cp train",
        description="Check a config, then train it on this node's ranks.",
        epilog="All other arguments go to train.py: --section.key=value for any key of the config, "
        "--dry-run [--rank N]. Keys: python train.py --help",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--ranks",
        type=at_least(1),
        metavar="N",
        help="of the job, on all nodes (default: one per GPU of each; 2 a node without GPUs)",
    )
    size.add_argument("--nproc", type=at_least(1), metavar="N", help="ranks on this node, instead of --ranks")
    parser.add_argument("--nnodes", type=at_least(1), metavar="N", default=1, help="nodes (default 1)")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="of node 0, the same on every node, with --nnodes")
    parser.add_argument(
        "--stopped-exit-code",
        type=at_least(0),
        metavar="CODE",
        default=0,
        help="exit code if a stop signal, on any node, ends the run before its end (default 0)",
    )
    add_comparison_arguments(parser)
    options, rest = parse_with_overrides(parser, arguments)
    if options.nnodes > 1 and not options.rdzv_endpoint:
        parser.error("several nodes need --rdzv-endpoint HOST:PORT of node 0, the same on every node")
    if options.ranks and options.ranks % options.nnodes:
        parser.error(f"--ranks {options.ranks} cannot be shared evenly by --nnodes {options.nnodes}")
    of_node = options.nproc or (options.ranks or 0) // options.nnodes  # 0: the default
    named = {entry.partition("=")[0] for entry in rest}
    if "--dry-run" not in rest and not named.isdisjoint(DRY_RUN_OPTIONS):
        parser.error(f"{' and '.join(DRY_RUN_OPTIONS)} need --dry-run")
    program = [str(TRAIN), options.config, *rest]
    if "--dry-run" in rest:
        if "--world-size" not in named and (of_node or options.nnodes > 1):
            program += ["--ranks", str((of_node or default_ranks()) * options.nnodes)]
        os.execv(sys.executable, [sys.executable, *program])
    try:
        config = load_config(options.config, [entry for entry in rest if OVERRIDE.fullmatch(entry)])
    except UserError as error:
        print(format_error(options.config, error), file=sys.stderr)
        return 2
    # The check gives one clear message and exit code 2 before any rank starts.
    nodes = options.nnodes
    ranks_of_job = ["--ranks", str(of_node * nodes)] if of_node else ["--nodes", str(nodes)]
    check = ["-m", "torchtitan_cp", "check", options.config, *ranks_of_job, *rest]
    for flag, length in (("--doctor", options.doctor), ("--verify-parity", options.verify_parity)):
        if length is not None:
            check.append(flag)
            program += [flag, str(length)]
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # varying lengths fragment a GPU's memory less this way
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    launcher = load_launcher([sys.executable, *check], options.stopped_exit_code)
    ranks = of_node or default_ranks()
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    endpoint = options.rdzv_endpoint if nodes > 1 else launcher.LOCALHOST
    how = {"stopped_code": options.stopped_exit_code}
    return report_os_errors(lambda: int(launcher.launch(program, ranks, nodes, endpoint, config.job, **how)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
