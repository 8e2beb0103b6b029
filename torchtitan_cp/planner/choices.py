"""What a search chooses for a whole run, and the values that it tries."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.config.names import ACTIVATIONS
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.optim.optimizers import OPTIMIZERS
from torchtitan_cp.parallel.checks import check_tensor_parallel
from torchtitan_cp.planner.devices import Cluster

MAX_PIPELINE_RANKS = 16
MLP_TILES = (1, 8, 16)


class Savings(NamedTuple):
    """What saves memory for time, beside the activation mode; the names are those of the keys."""

    mlp_tiles: int = 1
    offload: bool = False
    offload_state: bool = False
    fsdp_cpu_offload: bool = False

    @property
    def number(self) -> int:
        """How many are on."""
        return (self.mlp_tiles > 1) + self.offload + self.offload_state + self.fsdp_cpu_offload


class Choice(NamedTuple):
    """Degrees, activation mode, and what else saves memory."""

    tp: int
    pp: int
    ep: int
    checkpoint: str
    savings: Savings = Savings()

    def value(self, field: str) -> int | str | bool:
        """The value of one of KEYS."""
        of: Choice | Savings = self.savings if field in Savings._fields else self
        value: int | str | bool = getattr(of, field)
        return value

    def shown(self, field: str) -> str:
        """The value as in TOML."""
        value = self.value(field)
        return str(value).lower() if isinstance(value, bool) else str(value)


KEYS = {
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "ep": "parallel.ep",
    "checkpoint": "activation.checkpoint",
    "mlp_tiles": "activation.mlp_tiles",
    "offload": "activation.offload",
    "offload_state": "optimizer.offload_state",
    "fsdp_cpu_offload": "parallel.fsdp_cpu_offload",
}
OWN = "tp, pp, activation.checkpoint and activation.offload"  # what a stage may set for itself and a search decides


def choices(config: Config, args: ModelArgs, cluster: Cluster) -> Iterator[Choice]:
    """Degrees and modes to try: powers of two, tp inside a node; experts are shared by no ranks, a node or all."""
    least = next(savings_to_try(config, cluster))
    for tp in _powers(cluster.accelerator.ranks_per_node):
        try:
            check_tensor_parallel(args, tp)
        except ConfigError:
            continue
        for pp in _powers(min(cluster.ranks // tp, args.n_layers, MAX_PIPELINE_RANKS)):
            if cluster.ranks % (tp * pp) == 0:
                fsdp, node = cluster.ranks // (tp * pp), cluster.accelerator.ranks_per_node // tp
                sizes = dict.fromkeys((1, node, fsdp) if args.n_experts else (1,))
                shared = [ep for ep in sizes if args.n_experts % ep == fsdp % ep == 0]
                yield from (Choice(tp, pp, ep, mode, least) for ep in shared for mode in ACTIVATIONS)


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def savings_to_try(config: Config, cluster: Cluster) -> Iterator[Savings]:
    """From that which saves least memory to that which saves most of a device's.

    What the config sets itself stays, except `activation.offload`. On a CPU everything is in host memory already.
    """
    tiles = MLP_TILES if config.activation.mlp_tiles == 1 else (config.activation.mlp_tiles,)
    state, weights = config.optimizer.offload_state, config.parallel.fsdp_cpu_offload
    on_host = [(state, weights)]
    if cluster.accelerator.capability and not weights:
        on_host += [(True, False)] if not state and _optimizer_allows(config, "optimizer", "offload_state") else []
        on_host += [(state, True)] if _optimizer_allows(config, "parallel", "fsdp_cpu_offload") else []
    offloads = (False, True) if cluster.accelerator.capability else (False,)
    for where, mlp_tiles, offload in itertools.product(on_host, tiles, offloads):
        yield Savings(mlp_tiles, offload, *where)


def _optimizer_allows(config: Config, section: str, key: str) -> bool:
    """Whether the optimizer runs with this key on."""
    try:
        OPTIMIZERS[config.optimizer.name].check(config.with_keys(**{section: {key: True}}), {1})
    except ConfigError:
        return False
    return True


def with_choice(config: Config, choice: Choice, cluster: Cluster) -> Config:
    """The config with these choices; hybrid trades heads inside a node."""
    sections: dict[str, dict[str, object]] = {}
    for field, key in KEYS.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = choice.value(field)
    sections["parallel"] |= {"dp_replicate": 1, "dp_shard": -1, "cp": 1}
    all_to_all_ranks = max(1, cluster.accelerator.ranks_per_node // choice.tp)
    return config.with_keys(**sections, context_parallel={"strategy": "auto", "all_to_all_ranks": all_to_all_ranks})


def has_own_choice(stage: Stage) -> bool:
    """Whether a stage sets what the search chooses for the run."""
    return bool(stage.tp or stage.pp or stage.activation.checkpoint or stage.activation.offload is not None)


def with_exchange(stage: Stage, cp: int, strategy: str) -> Stage:
    """The stage with this context parallelism, and without what the search chooses for the run."""
    activation = dataclasses.replace(stage.activation, checkpoint=None, offload=None)
    return dataclasses.replace(stage, cp=cp, strategy=strategy, tp=None, pp=None, activation=activation)
