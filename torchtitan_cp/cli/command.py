"""What a command runs with: the architectures by name, and errors that end it with one message."""

import sys
from collections.abc import Callable

from models import ARCHITECTURES
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import UserError, format_error
from torchtitan_cp.training.registry import register


def run_command(work: Callable[[], int], config: str = "") -> int:
    """Run a command. Returns its exit code; 2 if an error of the user was printed.

    Args:
        config: path of the command's config as typed, for the message.
    """
    register(ARCHITECTURES)
    try:
        return work()
    except (UserError, ContextParallelError) as error:
        print(format_error(config, error), file=sys.stderr)
        return 2
