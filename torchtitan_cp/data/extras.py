"""Optional packages, which only some corpora and tokenizers need."""

import importlib
from typing import Any

from torchtitan_cp.data.errors import DataError


def import_extra(module: str, *, extra: str, needed_by: str) -> Any:
    """Import an optional package.

    Args:
        module: name of the module.
        extra: of this package, which installs it.
        needed_by: the key and value that need it, for the message.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{needed_by} needs the package `{package}`, which is not installed",
            fix=f"pip install 'torchtitan-cp[{extra}]'",
        ) from error
