"""Runs a command with the architectures registered, and ends it with one message after an error of the user."""

import signal
import sys
from collections.abc import Callable

import torch.distributed as dist

from models import ARCHITECTURES
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.cli.options import escape_unprintable, report_os_errors
from torchtitan_cp.config import UserError, format_error
from torchtitan_cp.data.errors import PreparationStoppedError
from torchtitan_cp.runtime.environment import forget_rank, is_launched
from torchtitan_cp.training.registry import register


def run_command(work: Callable[[], int], config: str = "", *, on_ranks: bool = False) -> int:
    """Run a command. Returns its exit code; 2 after an error of the user, 143 or 130 after a stop signal or Ctrl-C.

    Args:
        config: path of the command's config as typed, for the message.
        on_ranks: torchrun may start the command as several ranks; otherwise it always uses this process alone.
    """
    escape_unprintable()
    is_rank = dist.is_initialized() or (on_ranks and is_launched())
    if not is_rank and forget_rank() and on_ranks:
        print("note: one process; torchrun did not start it, so RANK of the environment is ignored", file=sys.stderr)
    register(ARCHITECTURES)
    try:
        return report_os_errors(work)
    except (UserError, ContextParallelError) as error:
        print(format_error(config, error), file=sys.stderr)
        return 2
    except PreparationStoppedError as stopped:
        print(stopped, file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
