"""Search for the layout of ranks that fits and takes the least time, with a reason for each choice."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.parallel.tensor import check_tensor_parallel
from torchtitan_cp.planner.devices import Cluster
from torchtitan_cp.planner.estimate import Estimate, estimate_stage, plan_config
from torchtitan_cp.planner.exchange import EXCHANGES
from torchtitan_cp.planner.stage import model_args_of, planned_stages

MODES = ("none", "selective", "attention_saved", "full")
MOST_PIPELINE_RANKS = 16


@dataclass(frozen=True)
class Choice:
    """Choices for the whole run."""

    tp: int
    pp: int
    checkpoint: str


@dataclass(frozen=True)
class Found:
    """The best of a search.

    Attributes:
        config: with its choices made; estimates: of its stages.
        reasons: a line for each choice.
    """

    config: Config
    estimates: tuple[Estimate, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Option:
    """One way to run one stage."""

    stage: Stage
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """Seconds of the whole stage."""
        return self.estimate.stage.steps * self.estimate.step_seconds


def search(config: Config, cluster: Cluster) -> Found:
    """Try tp, pp and activation modes for the run, and context-parallel degrees and strategies for each stage.

    The rest of the config stays, but dp_replicate becomes 1, and a stage's own tp, pp and mode are dropped.

    Raises:
        UserError, ContextParallelError: nothing fits, or a run would refuse everything that was tried.
    """
    args, refused = model_args_of(config), list[Exception]()
    tried = {choice: stage_options(config, args, choice, cluster, refused) for choice in choices(args, cluster)}
    totals = {
        choice: sum(best(options).seconds for options in stages)
        for choice, stages in tried.items()
        if stages and all(any(option.estimate.fits for option in options) for options in stages)
    }
    if not totals and not any(tried.values()) and refused:
        raise refused[-1]
    if not totals:
        raise ConfigError(
            f"nothing fits on {cluster.ranks} x {cluster.name}",
            fix="use more nodes, activation.mlp_tiles above 1, or a smaller training.micro_batch_sequences",
        )
    chosen = min(totals, key=lambda choice: totals[choice])
    picked = [best(options) for options in tried[chosen]]
    reasons = _choice_reasons(chosen, totals, tried)
    own = [index for index, stage in enumerate(config.curriculum.stages) if _sets_choice(stage)]
    if own:
        reasons.append(f"curriculum.stages {own}: their own tp, pp and activation.checkpoint are left out")
    reasons += [_stage_reason(option, options) for option, options in zip(picked, tried[chosen], strict=True)]
    stages = tuple(option.stage for option in picked)
    found = dataclasses.replace(
        with_choice(config, chosen, cluster), curriculum=dataclasses.replace(config.curriculum, stages=stages)
    )
    return Found(found, plan_config(found, cluster), tuple(reasons))


def choices(args: Any, cluster: Cluster) -> Iterator[Choice]:
    """Degrees and modes to try: powers of two, tensor parallelism inside a node."""
    for tp in _powers(min(cluster.ranks_per_node, cluster.ranks)):
        try:
            check_tensor_parallel(args, tp)
        except ConfigError:
            continue
        for pp in _powers(min(cluster.ranks // tp, args.n_layers, MOST_PIPELINE_RANKS)):
            if cluster.ranks % (tp * pp) == 0:
                yield from (Choice(tp, pp, mode) for mode in MODES)


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def with_choice(config: Config, choice: Choice, cluster: Cluster) -> Config:
    """The config with these choices; hybrid trades heads inside a node."""
    all_to_all_ranks = max(1, cluster.ranks_per_node // choice.tp)
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(
            config.parallel, tp=choice.tp, pp=choice.pp, dp_replicate=1, dp_shard=-1, cp=1, pp_split=()
        ),
        activation=dataclasses.replace(config.activation, checkpoint=choice.checkpoint),
        context_parallel=dataclasses.replace(
            config.context_parallel, strategy="auto", all_to_all_ranks=all_to_all_ranks
        ),
    )


def stage_options(
    config: Config, args: Any, choice: Choice, cluster: Cluster, refused: list[Exception]
) -> list[list[Option]]:
    """Every way to run each stage under a choice; an empty list if some stage has none.

    Args:
        refused: collects the errors of what a run would refuse.
    """
    chosen = with_choice(config, choice, cluster)
    ranks = cluster.ranks // (choice.tp * choice.pp)
    found = []
    for stage in config.curriculum.stages:
        options: list[Option] = []
        for cp in _powers(ranks):
            for strategy in EXCHANGES if cp > 1 else ("ring",):
                own = dataclasses.replace(stage.activation, checkpoint=None)
                way = dataclasses.replace(stage, cp=cp, strategy=strategy, tp=None, pp=None, activation=own)
                option = _try(chosen, args, way, cluster, refused)
                options += [option] if option else []
        if not options:
            return []
        found.append(options)
    return found


def _try(config: Config, args: Any, stage: Stage, cluster: Cluster, refused: list[Exception]) -> Option | None:
    """One way to run a stage; None if a run would refuse it."""
    all_to_all_ranks = config.context_parallel.all_to_all_ranks
    if stage.strategy == "hybrid" and not 1 < all_to_all_ranks < (stage.cp or 1):
        return None
    # Without its gate, which compares with other stages.
    alone = dataclasses.replace(
        config, curriculum=dataclasses.replace(config.curriculum, stages=(_to_its_limit(stage),))
    )
    try:
        [planned] = planned_stages(alone, cluster, args)
        return Option(stage, estimate_stage(planned))
    except (ConfigError, ContextParallelError) as error:
        refused.append(error)
        return None


def _sets_choice(stage: Stage) -> bool:
    """Whether a stage sets something that the search chooses for the whole run."""
    return any(value is not None for value in (stage.tp, stage.pp, stage.activation.checkpoint))


def _to_its_limit(stage: Stage) -> Stage:
    """The stage without a gate, at its longest."""
    most = stage.until.get("max_tokens")
    return dataclasses.replace(stage, until={}, tokens=int(most)) if most else stage


def best(options: list[Option]) -> Option:
    """The fastest that fits, else the smallest."""
    fitting = [option for option in options if option.estimate.fits]
    if fitting:
        return min(fitting, key=lambda option: option.seconds)
    return min(options, key=lambda option: option.estimate.memory.total)


def _choice_reasons(chosen: Choice, totals: dict[Choice, float], tried: dict[Choice, list[list[Option]]]) -> list[str]:
    """A line for each choice: the best that every other value gives."""
    reasons = []
    for part, key in (("tp", "parallel.tp"), ("pp", "parallel.pp"), ("checkpoint", "activation.checkpoint")):
        here = getattr(chosen, part)
        others = []
        for value in dict.fromkeys(getattr(choice, part) for choice in tried):
            if value == here:
                continue
            alike = [totals[choice] for choice in totals if getattr(choice, part) == value]
            more = f"takes {min(alike) / totals[chosen] - 1:+.0%}" if alike else "does not fit or divide"
            others.append(f"{value} {more}")
        reasons.append(f"{key} = {here}: " + ("; ".join(others) or "nothing else divides"))
    return reasons


def _stage_reason(option: Option, options: list[Option]) -> str:
    """A stage's degree and strategy beside the best of every other degree and strategy."""
    stage, estimate = option.stage, option.estimate
    degrees, strategies = [], []
    for cp in sorted({other.stage.cp or 1 for other in options} - {stage.cp}):
        degrees.append(f"cp {cp} {_beside(option, best([o for o in options if o.stage.cp == cp]))}")
    for other in options:
        if other.stage.cp == stage.cp and other.stage.strategy != stage.strategy:
            strategies.append(f"{other.stage.strategy} {_beside(option, other)}")
    return (
        f"{estimate.stage.name}: cp = {stage.cp}, {stage.strategy}, {estimate.stage.micro_batches} micro-batches; "
        + "; ".join([*degrees, *strategies])
    ).rstrip("; ")


def _beside(option: Option, other: Option) -> str:
    if not other.estimate.fits:
        return f"needs {other.estimate.memory.total / 2**30:.0f} GiB"
    return f"takes {other.seconds / option.seconds - 1:+.1%}"
