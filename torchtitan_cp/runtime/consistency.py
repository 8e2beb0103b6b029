"""Refuses ranks that would not run the same thing, at the start and when they enter a stage."""

import dataclasses
import hashlib
import platform
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_cp.config import Config, ConfigError

MAX_SHOWN = 5
DIGEST = "sha256:"  # begins a fact that says nothing to a reader; it is shown as a number


def check_same_job(config: Config, sources: Iterable[Path]) -> None:
    """Compare config, code and versions over all ranks. Collective.

    Args:
        sources: Python files of the program, and folders of them.

    Raises:
        ConfigError: as `check_agreement`.
    """
    versions = {"the code": code_version(sources), "Python": platform.python_version(), "torch": torch.__version__}
    settings = {name: repr(value) for name, value in flatten(dataclasses.asdict(config)).items()}
    check_agreement("config, code or versions", settings | versions)


def check_agreement(where: str, facts: Mapping[str, object]) -> None:
    """Compare what ranks are about to do, so that a difference is an error instead of a hang. Collective.

    Args:
        where: what the ranks differ in, for the message.
        facts: by name. Each is compared over the ranks that have a fact of this name. One that begins with DIGEST is
            not shown.

    Raises:
        ConfigError: on every rank, naming what differs and the ranks that have each value, the fewest first.
    """
    own = socket.gethostname(), {name: str(fact) for name, fact in facts.items()}
    gathered = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    hosts, differences = [host for host, _ in gathered], []
    for name in dict.fromkeys(name for _, rank_facts in gathered for name in rank_facts):
        ranks_by_value = defaultdict[str, list[int]](list)
        for rank, (_, rank_facts) in enumerate(gathered):
            if name in rank_facts:
                ranks_by_value[rank_facts[name]].append(rank)
        if len(ranks_by_value) > 1:
            groups = sorted(ranks_by_value.items(), key=lambda group: len(group[1]))
            values = ", ".join(
                f"{_name_ranks(ranks, hosts)} {f'version {number}' if value.startswith(DIGEST) else value}"
                for number, (value, ranks) in enumerate(groups, 1)
            )
            differences.append(f"{name}: {values}")
    if differences:
        more = f"; and {len(differences) - MAX_SHOWN} more" if len(differences) > MAX_SHOWN else ""
        raise ConfigError(
            f"the ranks differ in {where}: {'; '.join(differences[:MAX_SHOWN])}{more}",
            fix="start every node from the same files, arguments, checkpoints and text",
        )


def _name_ranks(ranks: list[int], hosts: list[str]) -> str:
    """E.g. "ranks 8, 9 on node1 have"; the host is named if these ranks share one, and other ranks have another."""
    shown = ", ".join(map(str, ranks[:MAX_SHOWN])) + f" and {len(ranks) - MAX_SHOWN} more" * (len(ranks) > MAX_SHOWN)
    if {hosts[rank] for rank in ranks} == {hosts[ranks[0]]} != set(hosts):
        shown += f" on {hosts[ranks[0]]}"
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"


def code_version(sources: Iterable[Path]) -> str:
    """A digest of the names and contents of Python files, wherever they are installed."""
    digest = hashlib.sha256()
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(f"{file.relative_to(source.parent)}\0".encode() + file.read_bytes() + b"\0")
    return DIGEST + digest.hexdigest()


def flatten(value: object, name: str = "") -> dict[str, object]:
    """The values of nested tables, and of lists of tables, by dotted names as on the command line."""
    if isinstance(value, dict):
        entries = [(f"{name}.{key}" if name else str(key), entry) for key, entry in value.items()]
    elif isinstance(value, (list, tuple)) and any(isinstance(entry, dict) for entry in value):
        entries = [(f"{name}[{index}]", entry) for index, entry in enumerate(value)]
    else:
        return {name: value}
    # Of each table also the names of its entries, as a key that only one of two configs has is a difference too.
    names = ", ".join(key.removeprefix(name).lstrip(".") for key, _ in entries) or "nothing"
    return {name: names} | {dotted: plain for key, entry in entries for dotted, plain in flatten(entry, key).items()}
