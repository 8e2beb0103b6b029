"""Packages that only some configs need."""

import importlib
from types import ModuleType

from torchtitan_cp.config.errors import ConfigError


def import_extra(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: name of the module.
        extra: of this package, which installs it.
        needed_by: the key and value that need it, for the message.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{needed_by} needs the package `{module.partition('.')[0]}`, which is not installed",
            fix=f"pip install 'torchtitan-cp[{extra}]'",
        ) from error
