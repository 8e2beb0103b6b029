"""What commands share: numbers on the command line, and imports on demand."""

import argparse
import gc
import importlib
from collections.abc import Callable
from typing import Any

LARGEST = 2**62  # torch takes integers of 64 bits


def at_least(least: int, kind: type = int) -> Callable[[str], Any]:
    """A `type` for argparse: a finite number from `least` on."""

    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value <= LARGEST:
            raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
        return value

    read.__name__ = kind.__name__  # what argparse calls it where the text is no number
    return read


def import_without_gc(name: str) -> Any:
    """Import a module by name with garbage collection off, which takes a tenth less time."""
    gc.disable()
    module = importlib.import_module(name)
    gc.freeze()  # later collections leave it out
    gc.enable()
    return module
