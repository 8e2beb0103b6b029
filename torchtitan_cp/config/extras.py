"""Packages that only some configs need."""

import importlib
import logging
import platform
import shlex
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from types import ModuleType

from packaging.requirements import Requirement
from packaging.version import Version

from torchtitan_cp.config.errors import ConfigError

logger = logging.getLogger(__name__)

DISTRIBUTION = "torchtitan-cp"
ANY_NEWER_PYTHON = "3.99"


def import_extra(module: str, *, extra: str, needed_by: str, pinned: bool = False) -> ModuleType:
    """Import an optional package.

    Args:
        module: name of the module.
        extra: of this package, which installs it.
        needed_by: the key and value that need it, for the message.
        pinned: a version below those that the extra allows will not do, and a later one is warned of.

    Raises:
        ConfigError: it is not installed, is too old, or cannot be imported.
    """
    package = module.partition(".")[0]
    allowed = _requirement(package, extra) if pinned else None
    if allowed and (version := _version(package)) and not allowed.specifier.contains(version, prereleases=True):
        if any(Version(version) < Version(bound.version) for bound in allowed.specifier if bound.operator == ">="):
            problem = f"the package `{package}` {allowed.specifier}, and {version} is installed"
            raise ConfigError(f"{needed_by} needs {problem}", fix=_install(package, extra))
        _warn_of_later(package, version, str(allowed.specifier))
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        problem = "is not installed" if missing else f"cannot be imported: {error}"
        raise ConfigError(
            f"{needed_by} needs the package `{package}`, which {problem}", fix=_install(package, extra)
        ) from error


@cache  # once
def _warn_of_later(package: str, version: str, allowed: str) -> None:
    logger.warning(f"{package} {version} is later than the versions that were tested ({allowed})")


def _install(package: str, extra: str) -> str:
    """How to install an extra into the environment of this process, which may not be the active one."""
    if not _requirement(package, extra) and _requirement(package, extra, python_version=ANY_NEWER_PYTHON):
        return (
            f"the extra `{extra}` has it for a newer Python than this {platform.python_version()}: make an environment "
            "of one (python3.12 -m venv ENV), and start by VENV=ENV ./run_train.sh"
        )
    return f"{shlex.quote(sys.executable)} -m pip install '{DISTRIBUTION}[{extra}]'"


def _requirement(package: str, extra: str, **environment: str) -> Requirement | None:
    """What an extra asks of a package, under this Python or in another environment; None if nothing."""
    with suppress(metadata.PackageNotFoundError):  # run from its folder, without being installed
        for requirement in map(Requirement, metadata.requires(DISTRIBUTION) or ()):
            marker = requirement.marker
            if requirement.name == package and marker and marker.evaluate({**environment, "extra": extra}):
                return requirement
    return None


def _version(package: str) -> str | None:
    """Of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
