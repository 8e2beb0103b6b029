"""Refuses ranks that would not run the same: before they begin, and as they enter a stage."""

import dataclasses
import hashlib
import platform
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_cp.config import Config, ConfigError

MAX_SHOWN = 5


def check_same_job(config: Config, sources: Iterable[Path]) -> None:
    """Compare config, code and versions over all ranks. Collective.

    Args:
        sources: Python files, and folders of them, that the run consists of.

    Raises:
        ConfigError: as `check_agreement`.
    """
    versions = {"the code": code_version(sources), "Python": platform.python_version(), "torch": torch.__version__}
    facts = flatten(dataclasses.asdict(config)) | versions
    check_agreement("config, code or versions", {name: repr(fact) for name, fact in facts.items()})


def check_agreement(where: str, facts: Mapping[str, Any]) -> None:
    """Compare what ranks are about to do, so that a difference is an error instead of a hang. Collective.

    Args:
        where: the ranks stand, for the message.
        facts: by name. Each is compared over the ranks that have one of this name.

    Raises:
        ConfigError: on every rank, naming what differs and the ranks that have each value, the fewest first.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (socket.gethostname(), {name: str(fact) for name, fact in facts.items()}))
    hosts, lines = [host for host, _ in every], []
    for name in dict.fromkeys(name for _, other in every for name in other):
        ranks = defaultdict(list)
        for rank, (_, other) in enumerate(every):
            if name in other:
                ranks[other[name]].append(rank)
        first, *others = sorted(ranks.items(), key=lambda found: len(found[1]))
        if others:
            shown = [f"{_name_ranks(first[1], hosts)} {name} {first[0]}"]
            lines.append(", ".join(shown + [f"{_name_ranks(found, hosts)} {value}" for value, found in others]))
    if lines:
        more = f"; and {len(lines) - MAX_SHOWN} more" if len(lines) > MAX_SHOWN else ""
        raise ConfigError(
            f"the ranks differ in {where}: {'; '.join(lines[:MAX_SHOWN])}{more}",
            fix="start every node from the same files, arguments, checkpoints and text",
        )


def _name_ranks(ranks: list[int], hosts: list[str]) -> str:
    own = {hosts[rank] for rank in ranks}
    shown = ", ".join(map(str, ranks[:MAX_SHOWN])) + f" and {len(ranks) - MAX_SHOWN} more" * (len(ranks) > MAX_SHOWN)
    shown += f" on {own.pop()}" if len(own) == 1 < len(set(hosts)) else ""  # all on one host of several
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"


def code_version(sources: Iterable[Path]) -> str:
    """A short digest of Python files by name and content, independent of the folder they are in."""
    digest = hashlib.sha256()
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(f"{file.relative_to(source.parent)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Nested tables, and lists of them, with dotted names, as on the command line."""
    if isinstance(value, dict):
        entries = [(f"{name}.{key}" if name else str(key), entry) for key, entry in value.items()]
    elif isinstance(value, (list, tuple)) and any(isinstance(entry, dict) for entry in value):
        entries = [(f"{name}[{index}]", entry) for index, entry in enumerate(value)]
    else:
        return {name: value}
    # With the entries their names: a key that only one of two configs has is a difference too.
    names = ", ".join(key.removeprefix(name).lstrip(".") for key, _ in entries) or "nothing"
    return {name: names} | {dotted: plain for key, entry in entries for dotted, plain in flatten(entry, key).items()}
