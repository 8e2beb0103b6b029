"""Errors a user can cause. Each carries its fix; the entry points print both and exit with code 2."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# Errors of a disk, which Python raises without a file's name if the file is open.
NAMELESS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ESTALE)


class UserError(Exception):
    """A file, key, corpus or folder of the user is wrong.

    Args:
        message: what is wrong, naming the file, key or rank.
        fix: how to correct it; printed on its own line.
    """

    def __init__(self, message: str, *, fix: str = "") -> None:
        self.message, self.fix = message, fix
        super().__init__(f"{message}\n  fix: {fix}" if fix else message)


class ConfigError(UserError):
    """The TOML file, or an override on the command line, is wrong."""


def format_error(config: str, error: Exception) -> str:
    """The message an entry point prints: the path of the config, once, and the error.

    Args:
        config: its path as typed. Errors of load_config already contain it; errors of later checks do not.
    """
    return f"error: {error}" if config in str(error).partition("\n")[0] else f"error: {config}: {error}"


def check_utf8(text: str, source: str) -> None:
    """Refuse text with bytes that are not UTF-8, which no TOML, JSON or message between ranks can hold.

    Python takes such bytes of a command line or of a file's name for half surrogate pairs.

    Args:
        source: the argument or key, for the message.

    Raises:
        ConfigError: naming it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{source} holds bytes that are not UTF-8: {text!a}",
            fix="rename the file or folder with characters in UTF-8 (ls -b shows the bytes), or use another one",
        ) from None


@contextmanager
def name_in_errors(path: object) -> Iterator[None]:
    """Add the name of a file or folder to an OSError that has none: those of reads, writes and memory maps."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def format_os_error(error: OSError) -> str:
    """The message for a file that cannot be read or written, or for output that cannot be printed.

    Raises:
        OSError: the error itself, if it concerns neither.
    """
    if error.errno == errno.EPIPE:
        return "error: Broken pipe: what read this output, or another process of this command, has ended"
    full = error.errno in NAMELESS or "No usable temporary directory" in str(error.strerror)
    if not (error.filename or full):
        raise error
    file = f"{error.filename}: " if error.filename else ""
    there = "there" if file else "where the run, data.cache_folder, temporary files (TMPDIR) and this output are"
    return f"error: {file}{error.strerror or error}\n  fix: check the disk, its space and permissions {there}"
