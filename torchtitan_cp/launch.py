"""What run_train.sh ends in: torchrun with restarts from the TOML, and a scheduler's signals passed to the ranks.

torchrun itself answers SIGTERM by killing its ranks after half a minute, and dies of SIGUSR1. Here it ignores both, and
the ranks get SIGTERM until they have finished their step, saved and left with exit code 0.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torchtitan_cp.config import UserError, load_config
from torchtitan_cp.config.load import OVERRIDE

STOP = (signal.SIGTERM, signal.SIGUSR1)
# A rank that is still starting does not hear yet.
REPEAT_SECONDS = 1.0
# A store shared by all attempts gives restarted ranks the addresses of dead ones. Source: pytorch issue 135712.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


# Where a job says that it ended only to be started anew, on the mesh that its next stage wants.
RELAUNCH_FILE = "RELAUNCH_FILE"


class Launcher:
    """torchrun as a child process.

    Args:
        command: torchrun with all its arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.stopping = False
        for number in STOP:
            signal.signal(number, self._stop)
        # A terminal sends it to torchrun as well, which ends its ranks.
        signal.signal(signal.SIGINT, lambda number, frame: None)
        self.torchrun = subprocess.Popen(command, preexec_fn=_ignore_stops, env={**os.environ, **FRESH_STORE})

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.stopping:
            print(f"{signal.Signals(number).name}: the ranks finish their step, save and stop", file=sys.stderr)
        self.stopping = True

    def wait(self) -> int:
        """Wait for the end of the job. Returns torchrun's exit code."""
        while True:
            try:
                return self.torchrun.wait(REPEAT_SECONDS)
            except subprocess.TimeoutExpired:
                if self.stopping:
                    for rank in children(self.torchrun.pid):
                        with suppress(ProcessLookupError):
                            os.kill(rank, signal.SIGTERM)


def _ignore_stops() -> None:
    """In the child, which hands it on to the ranks, until those say otherwise."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def children(pid: int) -> list[int]:
    """Processes that a process has started and that still run."""
    tasks = Path(f"/proc/{pid}/task")
    if tasks.exists():
        with suppress(FileNotFoundError):
            return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


def main(arguments: list[str]) -> int:
    """Start `TORCHRUN_ARGUMENTS -- train.py CONFIG ARGUMENTS` and see it through."""
    middle = arguments.index("--")
    torchrun, job = arguments[:middle], arguments[middle + 1 :]
    try:
        config = load_config(job[1], [entry for entry in job[2:] if OVERRIDE.fullmatch(entry)])
    except UserError as error:
        print(f"error: {job[1]}: {error}", file=sys.stderr)
        return 2
    command = [
        *(sys.executable, "-m", "torch.distributed.run", *torchrun),
        *("--max-restarts", str(config.job.max_restarts), "--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"),
        *job,
    ]
    with tempfile.TemporaryDirectory(prefix="relaunch-") as folder:
        again = Path(folder) / "again"
        os.environ[RELAUNCH_FILE] = str(again)
        while True:
            launcher = Launcher(command)
            code = launcher.wait()
            if code or launcher.stopping or not again.exists():
                return code
            again.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
