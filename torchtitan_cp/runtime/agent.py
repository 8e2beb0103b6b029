"""What starts a node's ranks, and starts them again: torchrun, its ranks forked where there is no GPU.

A rank imports torch and the trainer for some seconds. Without a GPU one process imports them, while the config is
checked, and each rank, of a restart too, is a fork of it. With GPUs a rank is a program of its own, as torchrun has it:
a process that has so much as asked CUDA for its devices must not be forked.

`python -m torchtitan_cp.runtime.agent DESCRIPTOR ARGUMENTS` prepares, waits for a byte from the descriptor, and then
does what torchrun does with the arguments; its exit code is that of the rank that failed first. If the descriptor is
closed, it ends without starting a rank.
"""

import importlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# Where train.py is, in a checkout as when it is installed.
HOME = Path(__file__).parents[2]
# What train.py imports, but by no name that a folder in which somebody trains may have for something else.
IMPORTED = ["torchtitan_cp.training.parity", "torchtitan_cp.planner.dry_run"]


def prepare() -> None:
    """Start the process that ranks are forked from, which imports the trainer.

    What torch and Python read when they are imported is to be in the environment.
    """
    sys.path.insert(0, str(HOME))  # of the ranks, which have it from here
    forkserver.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()


def run(arguments: Sequence[str], forking: bool) -> None:
    """What torchrun does.

    Args:
        arguments: torchrun's, without --standalone; the program is train.py.
        forking: ranks are forks of the process that `prepare` has started.
    """
    torchrun: Any = importlib.import_module("torch.distributed.run")
    options = torchrun.parse_args(list(arguments))
    if not forking:
        torchrun.run(options)
        return
    api: Any = importlib.import_module("torch.distributed.launcher.api")
    options.start_method = "forkserver"
    config, _, _ = torchrun.config_from_args(options)
    api.elastic_launch(config, rank)([options.training_script, *options.training_script_args])


def rank(program: list[str]) -> None:
    """In a fork: be a rank. program: train.py and its arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train: Any = importlib.import_module("train")
    sys.argv = program
    train.worker_main()


def main(arguments: list[str]) -> int:
    waits, forking = int(arguments[0]), sys.platform == "linux" and not shutil.which("nvidia-smi")
    if forking:
        prepare()
    torch: Any = importlib.import_module("torch")
    elastic: Any = importlib.import_module("torch.distributed.elastic.multiprocessing")
    errors: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous")
    if os.read(waits, 1):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # up to here the launcher's
        # Of the end of a rank it would tell where torch noticed it.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
        try:
            errors.record(run)(arguments[1:], forking and not torch.cuda.is_available())
        except errors.ChildFailedError as error:
            print(error, file=sys.stderr)
            code: int = error.get_first_failure()[1].exitcode
            return code if code > 0 else 1
        except rendezvous.RendezvousError as error:
            print(f"error: the nodes of the job lost each other, and theirs may say why: {error}", file=sys.stderr)
            return 1
        except (elastic.SignalException, KeyboardInterrupt) as stop:
            number = getattr(stop, "sigval", signal.SIGINT)
            told = "the ranks were ended; the same command goes on from the last checkpoint"
            print(f"{number.name}: {told}", file=sys.stderr)
            return 128 + int(number)
    return 0


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
