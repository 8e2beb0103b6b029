"""Keys that are gone, and values with another name, since the last version: files that have them are still read.

A run's own config.toml has every key, so what an earlier version wrote must stay readable: a key that is gone is left
out if it had its default.
"""

import logging
from collections.abc import Iterator
from typing import NamedTuple

from torchtitan_cp.config.errors import ConfigError

logger = logging.getLogger(__name__)


class Gone(NamedTuple):
    """A key that is gone.

    Attributes:
        harmless: values with which a run does what it does now.
        fix: what to do about another value.
    """

    harmless: tuple[object, ...]
    fix: str


NO_INJECTION = {"step": 0, "steps": 1, "rank": 0, "where": "forward", "layer": 0, "module": "", "kind": "nan"}
GONE = {
    "checkpoint.keep_every_steps": Gone((0,), "raise checkpoint.keep; the end of each stage is always kept"),
    "data.sources.group_depth": Gone((0,), "remove it; the documents of a folder are a group"),
    "compile.mode": Gone(("default",), "remove it; torch.compile runs in its default mode"),
    "data.group_depth": Gone((0,), "remove it; the documents of a folder are a group"),
    "data.prefetch_batches": Gone((2,), "remove it; data.workers read faster"),
    "data.separator": Gone((-1,), "remove it; the tokenizer's own end token follows each document"),
    "evaluation.passkey.depths": Gone((5,), "remove it; a key has five positions, and others with `evaluate --depths`"),
    "evaluation.passkey.keys": Gone((4,), "remove it; four keys are planted"),
    "health.bundles": Gone((3,), "remove it; health.replay = false keeps none"),
    "health.idle_expert_steps": Gone((100,), "remove it; experts/idle_share says how many experts get no token"),
    "health.inject": Gone(({**NO_INJECTION, "transient": False},), "remove it; only tests inject faults"),
    "health.lr_factor": Gone((0.1,), "remove it; no recovery changes the learning rate"),
    "health.lr_steps": Gone((100,), "remove it; no recovery changes the learning rate"),
    "health.max_consecutive_skips": Gone((5,), "remove it; a run rolls back after five skips in a row"),
    "health.max_lr_cuts": Gone((1,), "remove it; no recovery changes the learning rate"),
    "health.policy": Gone((["rollback", "lower_lr"], ["rollback"]), "remove it; max_rollbacks = 0 never rolls back"),
    "health.spike_window": Gone((64,), "remove it; a step is compared with 64 healthy ones"),
    "optimizer.implementation": Gone(("fused",), "remove it; AdamW runs fused"),
    "optimizer.muon_momentum": Gone((0.95,), "remove it; Muon's momentum decays by 0.95"),
    "parallel.expert_capacity": Gone((0.0, 0), "remove it; no expert drops a token"),
    "parallel.fsdp_prefetch": Gone((1,), "remove it; the next block's weights are gathered in advance"),
    "parallel.pp_split": Gone(([],), "remove it; layers are split over pipeline stages by their cost"),
}
RENAMED_VALUES = {"health.on_spike": {"trip": "handle"}}


def read_retired_keys(table: dict[str, object], file: str) -> None:
    """Take the keys that are gone out of the tables, and give renamed values their new names, in place.

    Raises:
        ConfigError: a key that is gone has a value that asks for more than runs do without it.
    """
    for dotted, gone in GONE.items():
        for owner, name in _owners(table, dotted):
            if (value := owner[name]) not in gone.harmless:
                raise ConfigError(f"{file}: {dotted} = {value!r}, and there is no such key any more", fix=gone.fix)
            del owner[name]
    for dotted, values in RENAMED_VALUES.items():
        for owner, name in _owners(table, dotted):
            value = owner[name]
            if isinstance(value, str) and value in values:
                logger.info("%s: %s = %r is now called %r", file, dotted, value, values[value])
                owner[name] = values[value]


def _owners(table: dict[str, object], dotted: str) -> Iterator[tuple[dict[str, object], str]]:
    """Each table that has this key, and the key's name in it; [[lists]] of tables count by their dotted name."""
    *parents, name = dotted.split(".")
    owners: list[object] = [table]
    for parent in parents:
        found = [owner.get(parent) for owner in owners if isinstance(owner, dict)]
        owners = [entry for value in found for entry in (value if isinstance(value, list) else [value])]
    yield from ((owner, name) for owner in owners if isinstance(owner, dict) and name in owner)
