"""Which checkpoints may be deleted: those that enough newer ones make superfluous, each of which verifies.

To verify a checkpoint is to read all of it, which no save can afford. So each is read at most once: one that this
process has written or loaded is known to be intact, and one of an earlier process if its files still have the sizes and
the times of the last change that its manifest lists. Only one that was changed since then is read.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torchtitan_cp.checkpoint.manifest import Manifest, compare_files, read_manifest
from torchtitan_cp.checkpoint.progress import DamagedError, read_progress
from torchtitan_cp.checkpoint.save import Stamps, file_stamps
from torchtitan_cp.config.run import Checkpoint

logger = logging.getLogger(__name__)

# How long checkpoints are read after a save. The thread that writes the next save reads them, and a stopped job waits.
READ_SECONDS = 30.0


class Retention:
    """Chooses the checkpoints to delete, and remembers which ones are intact."""

    def __init__(self, settings: Checkpoint) -> None:
        self.settings = settings
        self._known: dict[Path, tuple[Stamps, bool]] = {}  # files when it was verified, and whether it was intact

    def record(self, path: Path, stamps: Stamps, *, intact: bool) -> None:
        """Remember a checkpoint that was written or verified.

        Args:
            stamps: sizes and times of its files, from before they were verified; a file that changes is verified again.
        """
        self._known[path] = stamps, intact

    def expired(self, found: Sequence[tuple[int, Path]]) -> list[Path]:
        """The checkpoints to delete.

        The newest `keep` that are intact stay, and so do all newer ones and ends of stages. The newest intact one that
        recovery may go back to stays too: all steps after it may have been bad.

        Args:
            found: (step, folder) of each complete checkpoint, oldest first.
        """
        deadline = time.monotonic() + READ_SECONDS
        counted, has_healthy, expired = 0, False, list[Path]()
        for _, path in reversed(found):
            if counted < self.settings.keep:
                intact = self._is_intact(path, deadline)
                counted += intact
                has_healthy |= intact and _is_healthy(path)
            elif not has_healthy and _is_healthy(path) and self._is_intact(path, deadline):
                has_healthy = True
            elif not is_stage_end(path):
                expired.append(path)
        return expired

    def _is_intact(self, path: Path, deadline: float) -> bool:
        """Whether a checkpoint is known to be intact, or found to be so by `deadline`, in seconds of time.monotonic."""
        stamps, (known, intact) = file_stamps(path), self._known.get(path, ({}, False))
        if stamps and stamps == known:
            return intact
        try:
            manifest = read_manifest(path)
            read_progress(path)
        except DamagedError as error:
            problem = str(error)
        else:
            # If it is known, another file than those in the manifest has changed: the manifest.
            unchanged = not known and _is_unchanged(manifest, stamps)
            problem = "" if unchanged else _find_damage(path, manifest, deadline)
        if problem:
            logger.warning("%s does not count in checkpoint.keep: %s", path, problem)
        self.record(path, stamps, intact=not problem)
        return not problem


def _is_unchanged(manifest: Manifest, stamps: Stamps) -> bool:
    """Whether each file has the size and the time that the manifest lists. Older manifests list no times."""
    return all((entry["bytes"], entry.get("modified_ns")) == stamps.get(name) for name, entry in manifest.files.items())


def _find_damage(path: Path, manifest: Manifest, deadline: float) -> str:
    """What is wrong with the files, which are compared one by one until the deadline; "" if nothing is."""
    damage = compare_files(path, manifest, manifest.files, content=False)
    for name in manifest.files:
        if damage:
            break
        if time.monotonic() > deadline:
            return f"its files have other times than its manifest lists, and take more than {READ_SECONDS:g} s to read"
        damage = compare_files(path, manifest, [name])
    return "; ".join(damage)


def _is_healthy(path: Path) -> bool:
    with suppress(DamagedError):
        return read_progress(path).healthy
    return False


def is_stage_end(path: Path) -> bool:
    """Whether a checkpoint ends a stage, as far as can be read. A damaged one may: the user may recover something."""
    with suppress(DamagedError):
        return read_manifest(path).stage_end
    return True
