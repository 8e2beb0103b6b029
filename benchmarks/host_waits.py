"""Where the host waits for the GPU in the middle of a step: `python -m benchmarks.host_waits CONFIG OPTIONS...`.

Takes what train.py takes, and trains as a job of one rank. From its third step on, torch reports what makes the host
wait between the beginning of a step and its report, which the host must read. The places in the code, innermost first,
go to host_waits.jsonl in the run's folder, one line for each wait.
"""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import train
from benchmarks.cuda_record import environment_of_one_rank
from torchtitan_cp.health import monitor
from torchtitan_cp.training.trainer import Trainer

LINES = "host_waits.jsonl"
WARM_UP, FRAMES = 2, 5  # steps that compile and fill caches; frames of a place
NOT_OURS = ("/torch/", "/warnings.py", "/threading.py", __file__)


@contextmanager
def noted_waits() -> Iterator[list[str]]:
    """Gives a list to which each wait of a step from the third on is added, as its place."""
    places, steps = list[str](), count(1)
    own_step, own_gather = Trainer.forward_backward, monitor.gather_rows

    def watch(on: bool) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn" if on else "default")

    def step(trainer: Trainer, *inputs: Any) -> Any:
        watch(next(steps) > WARM_UP)
        return own_step(trainer, *inputs)

    def gather(own: torch.Tensor) -> Any:
        watch(False)
        return own_gather(own)

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):  # not torch's word about the mode itself
            places.append(place())

    patches = patch.object(Trainer, "forward_backward", step), patch.object(monitor, "gather_rows", gather)
    with patches[0], patches[1], warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield places


def place() -> str:
    """The innermost frames of the stack, torch's own left out."""
    frames = [f for f in traceback.extract_stack() if not any(name in f.filename for name in NOT_OURS)]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[: -FRAMES - 1 : -1])


def main(arguments: Sequence[str]) -> int:
    os.environ |= environment_of_one_rank()
    folder = next(x.partition("=")[2] for x in arguments if x.startswith("--job.dump_folder="))
    with noted_waits() as places:
        code = train.main(list(arguments))
    Path(folder, LINES).write_text("".join(json.dumps({"place": one}) + "\n" for one in places))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
