"""Search for the layout of ranks that fits and takes the least time, with reasons for each choice."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.check import check_measured_lengths
from torchtitan_cp.config.contract import PlannedArgs
from torchtitan_cp.config.names import ACTIVATIONS
from torchtitan_cp.config.sections import LRScheduler, Stage
from torchtitan_cp.parallel.checks import check_tensor_parallel
from torchtitan_cp.planner.devices import Cluster
from torchtitan_cp.planner.estimate import Estimate, plan_config
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.planner.strategy_costs import STRATEGY_COSTS

MAX_PIPELINE_RANKS = 16


class Choice(NamedTuple):
    """Degrees and activation mode of a whole run."""

    tp: int
    pp: int
    checkpoint: str
    ep: int = 1


def search(config: Config, cluster: Cluster) -> tuple[Config, list[str]]:
    """Try tp, pp, ep and activation modes for the run, and context-parallel degrees and strategies for each stage.

    The rest of the config stays, but dp_replicate becomes 1, and a stage's own tp, pp and activation mode are dropped.

    Returns:
        The config with the best combination, and a line for each choice.

    Raises:
        UserError, ContextParallelError: nothing fits, or a run would refuse every combination.
    """
    args, refused = sized_model_args(config), list[Exception]()
    tried = {choice: stage_options(config, args, choice, cluster, refused) for choice in choices(args, cluster)}
    picked = {choice: [best(options) for options in stages] for choice, stages in tried.items()}
    days = {
        choice: sum(estimate.days for estimate in stages)
        for choice, stages in picked.items()
        if stages and all(estimate.fits for estimate in stages)
    }
    if not days and not any(tried.values()) and refused:
        raise refused[-1]
    if not days:
        raise ConfigError(
            f"nothing fits on {cluster.ranks} x {cluster.name}",
            fix="use more nodes, activation.mlp_tiles above 1, or a smaller training.micro_batch_sequences",
        )
    chosen = min(days, key=lambda choice: days[choice])
    reasons = _choice_reasons(chosen, days, list(tried))
    stages = config.curriculum.stages
    if overriding := [i for i, stage in enumerate(stages) if stage.tp or stage.pp or stage.activation.checkpoint]:
        reasons.append(f"curriculum.stages {overriding}: their own tp, pp and activation.checkpoint are left out")
    found = []
    for stage, estimate, options in zip(stages, picked[chosen], tried[chosen], strict=True):
        reasons.append(_stage_reason(estimate, options))
        found.append(_with_exchange(stage, estimate.stage.cp, estimate.stage.strategy))
    return with_choice(config, chosen, cluster).with_keys(curriculum={"stages": tuple(found)}), reasons


def choices(args: PlannedArgs, cluster: Cluster) -> Iterator[Choice]:
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
                yield from (Choice(tp, pp, mode, ep) for ep in shared for mode in ACTIVATIONS)


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def with_choice(config: Config, choice: Choice, cluster: Cluster) -> Config:
    """The config with these choices; hybrid trades heads inside a node."""
    tp, pp, checkpoint, ep = choice
    all_to_all_ranks = max(1, cluster.accelerator.ranks_per_node // tp)
    return config.with_keys(
        parallel={"tp": tp, "pp": pp, "ep": ep, "dp_replicate": 1, "dp_shard": -1, "cp": 1},
        activation={"checkpoint": checkpoint},
        context_parallel={"strategy": "auto", "all_to_all_ranks": all_to_all_ranks},
    )


def _with_exchange(stage: Stage, cp: int, strategy: str) -> Stage:
    """The stage with this context parallelism, and without its own tp, pp and activation mode."""
    activation = dataclasses.replace(stage.activation, checkpoint=None)
    return dataclasses.replace(stage, cp=cp, strategy=strategy, tp=None, pp=None, activation=activation)


def stage_options(
    config: Config, args: PlannedArgs, choice: Choice, cluster: Cluster, refused: list[Exception]
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
    for part, key in enumerate(("parallel.tp", "parallel.pp", "activation.checkpoint", "parallel.ep")):
        if key == "parallel.ep" and len({choice.ep for choice in tried}) == 1:
            continue
        others = []
        for value in dict.fromkeys(choice[part] for choice in tried if choice[part] != chosen[part]):
            with_value = [days[choice] for choice in days if choice[part] == value]
            result = f"takes {min(with_value) / days[chosen] - 1:+.0%}" if with_value else "does not fit or divide"
            others.append(f"{value} {result}")
        reasons.append(f"{key} = {chosen[part]}: " + ("; ".join(others) or "nothing else divides"))
    return reasons


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
    return f"takes {other.days / found.days - 1:+.1%}" if other.fits else f"needs {other.memory.total / 2**30:.0f} GiB"
