"""Search for the layout of ranks that fits and takes the least time, with reasons for each choice."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.check import check_measured_lengths
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.config.names import ACTIVATIONS
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.config.training import LRScheduler
from torchtitan_cp.optim.optimizers import OPTIMIZERS
from torchtitan_cp.parallel.checks import check_tensor_parallel
from torchtitan_cp.planner.devices import GIB, Cluster
from torchtitan_cp.planner.estimate import Estimate, plan_config
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.planner.strategy_costs import STRATEGY_COSTS

MAX_PIPELINE_RANKS = 16
MLP_TILES = 8


class Choice(NamedTuple):
    """Degrees and activation mode of a whole run; offload is that of activations."""

    tp: int
    pp: int
    checkpoint: str
    offload: bool = False
    ep: int = 1


KEYS = ("parallel.tp", "parallel.pp", "activation.checkpoint", "activation.offload", "parallel.ep")


def search(config: Config, cluster: Cluster) -> tuple[Config, list[str]]:
    """Try tp, pp, ep and activation modes for the run, and context-parallel degrees and strategies for each stage.

    If nothing fits, what costs time and saves memory is added: see `_savers`. The rest of the config stays, but
    dp_replicate becomes 1, and a stage's own tp, pp and activation mode are dropped.

    Returns:
        The config with the best combination, and a line for each choice.

    Raises:
        UserError, ContextParallelError: nothing fits, or a run would refuse every combination.
    """
    args, refused = sized_model_args(config), list[Exception]()
    on_gpu = bool(cluster.accelerator.capability)  # else all is in host memory
    for saver, keys in [("", {}), *_savers(config, on_gpu)]:
        with_saver, reasons = config.with_keys(**keys), [f"{saver}: nothing fits without"] if saver else []
        tried = {c: stage_options(with_saver, args, c, cluster, refused) for c in choices(args, cluster)}
        if on_gpu:
            tried |= {choice._replace(offload=True): _offloaded(stages) for choice, stages in tried.items()}
        picked = {choice: [best(options) for options in stages] for choice, stages in tried.items()}
        days = {
            choice: sum(estimate.days for estimate in stages)
            for choice, stages in picked.items()
            if stages and all(estimate.fits for estimate in stages)
        }
        if not days and not any(tried.values()) and refused:
            raise refused[-1]
        if days:
            break
    else:
        raise _nothing_fits(config, cluster, saver, picked)
    config = with_saver
    chosen = min(days, key=lambda choice: days[choice])
    reasons += _choice_reasons(chosen, days, list(tried))
    stages = config.curriculum.stages
    if overriding := [i for i, stage in enumerate(stages) if _has_own_choice(stage)]:
        reasons.append(f"curriculum.stages {overriding}: their own {OWN} are left out")
    found = []
    for stage, estimate, options in zip(stages, picked[chosen], tried[chosen], strict=True):
        reasons.append(_stage_reason(estimate, options))
        found.append(_with_exchange(stage, estimate.stage.cp, estimate.stage.strategy))
    return with_choice(config, chosen, cluster).with_keys(curriculum={"stages": tuple(found)}), reasons


OWN = "tp, pp, activation.checkpoint and activation.offload"


def _has_own_choice(stage: Stage) -> bool:
    """Whether a stage sets what the search chooses for the run."""
    return bool(stage.tp or stage.pp or stage.activation.checkpoint or stage.activation.offload is not None)


def _savers(config: Config, on_gpu: bool) -> list[tuple[str, dict[str, dict[str, object]]]]:
    """What costs time and saves memory, in the order in which it is tried until something fits: (name, all its keys).

    Each includes the one before it, but weights and optimizer state in host memory need no `optimizer.offload_state`.
    """
    tiles: dict[str, object] = {"mlp_tiles": MLP_TILES} if config.activation.mlp_tiles == 1 else {}
    name = f"activation.mlp_tiles = {MLP_TILES}" if tiles else ""
    savers = [(name, {"activation": tiles})] if tiles else []
    host = [("optimizer", "offload_state"), ("parallel", "fsdp_cpu_offload")]
    for section, key in host if on_gpu and not config.parallel.fsdp_cpu_offload else ():
        if _optimizer_allows(config, section, key) and not getattr(getattr(config, section), key):
            said = ", ".join(filter(None, (name, f"{section}.{key} = true")))
            savers.append((said, {"activation": tiles, section: {key: True}}))
    return savers


def _optimizer_allows(config: Config, section: str, key: str) -> bool:
    """Whether the optimizer runs with this key on."""
    try:
        OPTIMIZERS[config.optimizer.name].check(config.with_keys(**{section: {key: True}}), {1})
    except ConfigError:
        return False
    return True


def _nothing_fits(config: Config, cluster: Cluster, saver: str, picked: dict[Choice, list[Estimate]]) -> ConfigError:
    """The error where no choice fits; it says what was tried, and how much the smallest needs."""
    longest = (max(stages, key=lambda one: one.memory.total) for stages in picked.values() if stages)
    smallest = min(longest, key=lambda one: one.memory.total)
    needed, usable, where = smallest.memory.total, cluster.usable_bytes, "a rank"
    if smallest.fits_device:
        needed, usable, where = sum(smallest.host.values()), cluster.usable_host_bytes, "of a node's host memory"
    sizes = f"the smallest layout needs {needed / GIB:.1f} GiB {where}, and {usable / GIB:.1f} are usable"
    offload = any(choice.offload for choice in picked)
    tried = ", ".join(filter(None, (saver, "activation.offload = true" if offload else "")))
    fewer = config.training.micro_batch_sequences > 1
    return ConfigError(
        f"nothing fits on {cluster.ranks} x {cluster.name}{tried and f', not even with {tried}'}: {sizes}",
        fix="use more nodes" + (", or a smaller training.micro_batch_sequences" if fewer else ""),
    )


def _offloaded(stages: list[list[Estimate]]) -> list[list[Estimate]]:
    """The same estimates with activations in host memory, which no other rule forbids."""
    config = {"activation": {"offload": True}}
    return [[dataclasses.replace(one, config=one.config.with_keys(**config)) for one in options] for options in stages]


def choices(args: ModelArgs, cluster: Cluster) -> Iterator[Choice]:
    """Degrees and modes to try: powers of two, tp inside a node; experts are shared by no ranks, a node or all."""
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
                yield from (Choice(tp, pp, mode, ep=ep) for ep in shared for mode in ACTIVATIONS)


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def with_choice(config: Config, choice: Choice, cluster: Cluster) -> Config:
    """The config with these choices; hybrid trades heads inside a node."""
    tp, pp, checkpoint, offload, ep = choice
    all_to_all_ranks = max(1, cluster.accelerator.ranks_per_node // tp)
    return config.with_keys(
        parallel={"tp": tp, "pp": pp, "ep": ep, "dp_replicate": 1, "dp_shard": -1, "cp": 1},
        activation={"checkpoint": checkpoint, "offload": offload},
        context_parallel={"strategy": "auto", "all_to_all_ranks": all_to_all_ranks},
    )


def _with_exchange(stage: Stage, cp: int, strategy: str) -> Stage:
    """The stage with this context parallelism, and without its own tp, pp and activation mode."""
    activation = dataclasses.replace(stage.activation, checkpoint=None, offload=None)
    return dataclasses.replace(stage, cp=cp, strategy=strategy, tp=None, pp=None, activation=activation)


def stage_options(
    config: Config, args: ModelArgs, choice: Choice, cluster: Cluster, refused: list[Exception]
) -> list[list[Estimate]]:
    """Estimates of each stage under a choice, with every cp and strategy; an empty list if a stage has none.

    Args:
        refused: collects the errors of combinations that a run would refuse.
    """
    # A single stage may be shorter than the warm-up of the run, and its time does not depend on the learning rate.
    chosen = dataclasses.replace(with_choice(config, choice, cluster), lr_scheduler=LRScheduler())
    inner, fsdp = chosen.context_parallel.all_to_all_ranks, cluster.ranks // (choice.tp * choice.pp)
    found = []
    for index, stage in enumerate(config.curriculum.stages):
        # A gate compares with other stages and may open during the warm-up: plan the stage without it, at its longest.
        most = stage.until.get("max_tokens")
        alone = dataclasses.replace(stage, until={}, tokens=int(most), lr=None) if most else stage
        options: list[Estimate] = []
        for cp in (degree for degree in range(1, fsdp + 1) if fsdp % degree == 0):
            for strategy in STRATEGY_COSTS if cp > 1 else ("ring",):
                if strategy == "hybrid" and not 1 < inner < cp:
                    continue
                tried = chosen.with_keys(curriculum={"stages": (_with_exchange(alone, cp, strategy),)})
                try:
                    check_measured_lengths(config, stage, f"curriculum.stages[{index}]", cp, choice.tp)
                    options += plan_config(tried, cluster, args)
                except (ConfigError, ContextParallelError) as error:
                    refused.append(error)
        if not options:
            return []
        found.append(options)
    return found


def best(options: list[Estimate]) -> Estimate:
    """The fastest that fits, else the smallest."""
    return min(options, key=lambda option: (not option.fits, option.days if option.fits else option.memory.total))


def _choice_reasons(chosen: Choice, days: dict[Choice, float], tried: list[Choice]) -> list[str]:
    """A line for each choice, with the best time of every other value."""
    reasons = []
    for part, key in enumerate(KEYS):
        if key in ("activation.offload", "parallel.ep") and len({choice[part] for choice in tried}) == 1:
            continue
        others = []
        for value in dict.fromkeys(choice[part] for choice in tried if choice[part] != chosen[part]):
            with_value = [days[choice] for choice in days if choice[part] == value]
            result = f"takes {min(with_value) / days[chosen] - 1:+.0%}" if with_value else "does not fit or divide"
            others.append(f"{_toml(value)} {result}")
        reasons.append(f"{key} = {_toml(chosen[part])}: " + ("; ".join(others) or "nothing else divides"))
    return reasons


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _stage_reason(found: Estimate, options: list[Estimate]) -> str:
    """A stage's degree and strategy, compared with the best of every other degree and with other strategies."""
    stage, others = found.stage, []
    for cp in sorted({option.stage.cp for option in options} - {stage.cp}):
        others.append(f"cp {cp} {_compare(found, best([option for option in options if option.stage.cp == cp]))}")
    for option in options:
        if option.stage.cp == stage.cp and option.stage.strategy != stage.strategy:
            others.append(f"{option.stage.strategy} {_compare(found, option)}")
    choice = f"{stage.name}: cp = {stage.cp}, {stage.strategy}, {stage.micro_batches} micro-batches"
    return "; ".join([choice, *others])


def _compare(found: Estimate, other: Estimate) -> str:
    if other.fits:
        return f"takes {other.days / found.days - 1:+.1%}"
    if other.fits_device:
        return f"needs {sum(other.host.values()) / GIB:.0f} GiB of a node's host memory"
    return f"needs {other.memory.total / GIB:.0f} GiB"
