"""Permissions of files that a library writes."""

from pathlib import Path


def share_as_folder(path: Path) -> None:
    """Let those read and write a file who may its folder, which the umask decided when the run made it.

    safetensors leaves its files to their owner alone.
    """
    path.chmod(path.parent.stat().st_mode & 0o666)
