"""Numbers for the groups that documents belong to, and the names they stand for."""

import json
import os
from pathlib import Path

GROUPS_FILE = "groups.jsonl"


class Groups:
    """Gives each group's name a number, in the order they come: 0, 1, 2, ...

    The names lie in `groups.jsonl`, a line `[number, name]` each. A group without a name takes a number and no line.

    Args:
        folder: where the file goes.

    Attributes:
        count: numbers given so far.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.count = folder / GROUPS_FILE, 0
        self._numbers: dict[str, int] = {}
        self._unwritten: list[str] = []

    def number(self, name: str | None) -> int:
        """The group's number; a new one for None, which is no other document's group."""
        if name is not None and name in self._numbers:
            return self._numbers[name]
        number, self.count = self.count, self.count + 1
        if name is not None:
            self._numbers[name] = number
            self._unwritten.append(json.dumps([number, name]))
        return number

    def commit(self) -> dict[str, int]:
        """Bring the names to disk. Returns what `restore` needs."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in self._unwritten)
            file.flush()
            os.fsync(file.fileno())
        self._unwritten.clear()
        return {"count": self.count, "bytes": self.path.stat().st_size}

    def restore(self, state: dict[str, int]) -> str:
        """Go on from a commit. Returns what is wrong with the file, in words; empty if it holds what was committed."""
        if not self.path.exists() or self.path.stat().st_size < state["bytes"]:
            return f"{self.path.name} is shorter than {state['bytes']} bytes"
        os.truncate(self.path, state["bytes"])
        self.count = state["count"]
        with open(self.path, encoding="utf-8") as file:
            self._numbers = {name: number for number, name in map(json.loads, file)}
        return ""
