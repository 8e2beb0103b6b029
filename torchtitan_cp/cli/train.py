"""What run_train.sh ends in: a check, torchrun with restarts from the TOML, a scheduler's signals passed to the ranks.

torchrun itself answers SIGTERM by killing its ranks after half a minute, and dies of SIGUSR1. Here it ignores both, and
the ranks get SIGTERM until they have finished their step, saved and left with exit code 0.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torchtitan_cp.config import UserError, format_error, load_config
from torchtitan_cp.config.load import OVERRIDE

STOP = (signal.SIGTERM, signal.SIGUSR1)
# A rank that is still starting does not hear yet.
REPEAT_SECONDS = 1.0
# A store shared by all attempts gives restarted ranks the addresses of dead ones. Source: pytorch issue 135712.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# Of torchrun, for a job on one node: a port of its own, as --standalone has it.
HERE = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
# Beside this package, in a checkout as when it is installed.
TRAIN = Path(__file__).parents[2] / "train.py"
# Where a job says that it ended only to be started anew, on the mesh that its next stage wants.
RELAUNCH_FILE = "RELAUNCH_FILE"


class Launcher:
    """torchrun as a child process, which makes ready (torchtitan_cp.runtime.agent) and waits for `go`.

    Args:
        arguments: of torchrun.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.stopping = self.told = False
        for number in STOP:
            signal.signal(number, self._stop)
        signal.signal(signal.SIGINT, self._interrupt)
        waits, self._tells = os.pipe()
        self.torchrun = subprocess.Popen(
            [sys.executable, "-m", "torchtitan_cp.runtime.agent", str(waits), *arguments],
            pass_fds=(waits,),
            preexec_fn=_ignore_stops,
            env={**os.environ, **FRESH_STORE, "PYTHONUNBUFFERED": "1"},
        )
        os.close(waits)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.stopping:
            print(f"{signal.Signals(number).name}: the ranks finish their step, save and stop", file=sys.stderr)
        self.stopping = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """A terminal sends it to torchrun as well, which ends its ranks once it has been told to go."""
        if not self.told:
            raise KeyboardInterrupt

    def go(self) -> None:
        """Have it start the ranks."""
        self.told = True
        with suppress(BrokenPipeError):  # it is dead, and wait() says so
            os.write(self._tells, b"g")
        os.close(self._tells)

    def dismiss(self) -> None:
        """Have it end without a rank."""
        self.told = True
        os.close(self._tells)
        self.torchrun.wait()

    def wait(self) -> int:
        """Wait for the end of the job. Returns torchrun's exit code."""
        while True:
            try:
                return self.torchrun.wait(REPEAT_SECONDS)
            except subprocess.TimeoutExpired:
                if self.stopping:
                    for rank in ranks_of(self.torchrun.pid):
                        with suppress(ProcessLookupError):
                            os.kill(rank, signal.SIGTERM)


def _ignore_stops() -> None:
    """In a child, which hands it on to its own, until they say otherwise."""
    for number in (*STOP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def children(pid: int) -> list[int]:
    """Processes that a process has started and that still run."""
    tasks = Path(f"/proc/{pid}/task")
    if tasks.exists():
        with suppress(FileNotFoundError):
            return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


def ranks_of(agent: int) -> list[int]:
    """Ranks that torchrun has started and that still run, by itself or from the process that they are forks of.

    Args:
        agent: process id of a `Launcher.torchrun`.
    """
    started = children(agent)
    for server in started:
        with suppress(OSError):
            if b"multiprocessing.forkserver" in Path(f"/proc/{server}/cmdline").read_bytes():
                return children(server)
    return started


def launch(torchrun: Sequence[str], job: Sequence[str], check: Sequence[str] = ()) -> int:
    """Start `train.py CONFIG ARGUMENTS` by torchrun with these arguments and see it through; its exit code.

    Args:
        check: arguments of a Python that says first whether it would run, while torchrun makes ready.
    """
    try:
        config = load_config(job[1], [entry for entry in job[2:] if OVERRIDE.fullmatch(entry)])
    except UserError as error:
        print(format_error(job[1], error), file=sys.stderr)
        return 2
    # Under nohup a job outlives its terminal.
    hang_up = "" if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ",SIGHUP"
    arguments = [
        *torchrun,
        *("--max-restarts", str(config.job.max_restarts), "--signals-to-handle", f"SIGINT,SIGQUIT{hang_up}"),
        *job,
    ]
    with tempfile.TemporaryDirectory(prefix="relaunch-") as folder:
        again = Path(folder) / "again"
        os.environ[RELAUNCH_FILE] = str(again)
        launcher, code = Launcher(arguments), 0
        try:
            if check:
                code = subprocess.run([sys.executable, *check], check=False, preexec_fn=_ignore_stops).returncode
        except KeyboardInterrupt:
            print("SIGINT: no rank was started", file=sys.stderr)
            code = 128 + signal.SIGINT
        if code or launcher.stopping:
            launcher.dismiss()
            return code
        while True:
            launcher.go()
            code = launcher.wait()
            if code or launcher.stopping or not again.exists():
                return code
            again.unlink()
            launcher = Launcher(arguments)


def add_parity_argument(parser: argparse.ArgumentParser) -> None:
    """--verify-parity, of the launcher and of train.py."""
    parser.add_argument(
        "--verify-parity",
        nargs="?",
        const=0,
        type=int,
        metavar="LENGTH",
        help="train nothing: compare the first step, cut to LENGTH tokens, with one rank; exit code 5: it differs",
    )


def default_ranks() -> int:
    """Ranks of a node that nobody gave a number: one a GPU, 2 without."""
    if not shutil.which("nvidia-smi"):
        return 2
    count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(count, capture_output=True, text=True, check=True).stdout) or 2


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="torchtitan-cp train",
        description="Check a config, then train it on this node's ranks by torchrun.",
        epilog="Whatever else is given goes to train.py: --section.key=value for any key of the config, "
        "--dry-run [--world-size N] [--rank N]. Keys: python train.py --help",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file")
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks on this node (default: one per GPU; 2 without)")
    parser.add_argument("--nnodes", type=int, metavar="N", default=1, help="nodes (default 1)")
    parser.add_argument("--node-rank", type=int, metavar="N", default=0, help="this node's number, from 0")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="of node 0, the same on every node, with --nnodes")
    add_parity_argument(parser)
    options, rest = parser.parse_known_args(arguments)
    if min(1 if options.nproc is None else options.nproc, options.nnodes) < 1:
        parser.error("--nproc and --nnodes are at least 1")
    if options.nnodes > 1 and not options.rdzv_endpoint:
        parser.error("several nodes need --rdzv-endpoint HOST:PORT of node 0, the same on every node")
    job = [str(TRAIN), options.config, *rest]
    if "--dry-run" in rest:
        return subprocess.run([sys.executable, *job], check=False).returncode
    ranks = options.nproc or default_ranks()
    if ranks > 1:  # else torchrun says so, too late for what has been imported
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # One clear message and exit code 2 before any rank starts.
    check = ["-m", "torchtitan_cp.cli.check", options.config, "--ranks", str(ranks * options.nnodes), *rest]
    if options.verify_parity is not None:
        job += ["--verify-parity", str(options.verify_parity)]
    rendezvous: Sequence[str] = HERE
    if options.nnodes > 1:
        place = ["--nnodes", str(options.nnodes), "--node-rank", str(options.node_rank)]
        rendezvous = [*place, "--rdzv-backend", "c10d", "--rdzv-endpoint", options.rdzv_endpoint]
    return launch([*rendezvous, "--nproc-per-node", str(ranks)], job, check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
