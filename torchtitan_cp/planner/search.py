"""Search for the layout of ranks, and what is offloaded or tiled, that fits and takes the least time."""

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.check import check_measured_lengths
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.config.training import LRScheduler
from torchtitan_cp.planner.choices import Choice, Savings, choices, savings_to_try, with_choice, with_exchange
from torchtitan_cp.planner.devices import Cluster
from torchtitan_cp.planner.estimate import Estimate, plan_config
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.planner.strategy_costs import STRATEGY_COSTS

NO_SLOWER = 1.03  # estimates are not exact: within this factor of the fastest, the fewest savings are chosen


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice, and of each stage the estimates with every context-parallel degree and strategy."""

    choice: Choice
    stages: list[list[Estimate]]

    @cached_property
    def picked(self) -> list[Estimate]:
        """The best of each stage."""
        return [best(options) for options in self.stages]

    @cached_property
    def fits(self) -> bool:
        return all(estimate.fits for estimate in self.picked)

    @cached_property
    def days(self) -> float:
        """Duration of all stages."""
        return sum(estimate.days for estimate in self.picked)

    @cached_property
    def least_days(self) -> float:
        """What all stages would take if everything fitted."""
        return sum(min(estimate.days for estimate in options) for options in self.stages)

    @cached_property
    def fullest(self) -> Estimate:
        """The stage that lacks most memory, or leaves least."""
        return max(self.picked, key=lambda estimate: estimate.fullness)


def best(options: list[Estimate]) -> Estimate:
    """The fastest that fits, else the nearest to fitting."""
    fitting = [option for option in options if option.fits]
    if not fitting:
        return min(options, key=lambda option: option.fullness)
    return min(fitting, key=lambda option: option.days)


@dataclasses.dataclass(frozen=True)
class Search:
    """What a search tried.

    Attributes:
        tried: candidates whose memory was looked at.
        slower: first candidates of degrees and modes that would be slower than the fastest, even if everything fitted;
            no more was tried with them.
        found: of the fastest that fit, that with the fewest savings; None: none fits.
    """

    config: Config
    cluster: Cluster
    tried: list[Candidate]
    slower: list[Candidate]
    found: Candidate | None

    @property
    def nearest(self) -> Candidate:
        """The candidate that lacks least to fit."""
        return min(self.tried, key=lambda candidate: candidate.fullest.fullness)

    def found_config(self) -> Config:
        """The config with what was found."""
        assert self.found
        pairs = zip(self.config.curriculum.stages, self.found.picked, strict=True)
        stages = tuple(with_exchange(stage, estimate.stage.cp, estimate.stage.strategy) for stage, estimate in pairs)
        return with_choice(self.config, self.found.choice, self.cluster).with_keys(curriculum={"stages": stages})


def search(config: Config, cluster: Cluster) -> Search:
    """Try degrees, activation modes, tiles and offload for the run, and cp and strategies for each stage.

    The rest of the config stays, but dp_replicate becomes 1, and a stage's own tp, pp and activation mode are dropped.
    Degrees and modes are tried in the order of what they would take if everything fitted, until none can be faster.

    Raises:
        UserError, ContextParallelError: a run would refuse every combination.
    """
    args, refused = sized_model_args(config), list[Exception]()
    first = (Candidate(c, stage_options(config, args, c, cluster, refused)) for c in choices(config, args, cluster))
    ordered = sorted((group for group in first if group.stages), key=lambda group: group.least_days)
    if not ordered:
        raise refused[-1]
    tried, slower, most = list[Candidate](), list[Candidate](), float("inf")
    for group in ordered:
        if group.least_days > most:
            slower.append(group)
            continue
        *others, smallest = _with_savings(group, config, args, cluster)
        if all(estimate.fits_device for estimate in smallest.picked):
            tried += others
        tried.append(smallest)
        most = NO_SLOWER * min((one.days for one in tried if one.fits), default=float("inf"))
    near = [candidate for candidate in tried if candidate.fits and candidate.days <= most]
    found = min(near, key=lambda candidate: (candidate.choice.savings.number, candidate.days), default=None)
    return Search(config, cluster, tried, slower, found)


def _with_savings(group: Candidate, config: Config, args: ModelArgs, cluster: Cluster) -> Iterator[Candidate]:
    """The group's degrees and mode with everything that saves memory, as far as a run takes it."""
    by_tiles = {group.choice.savings.mlp_tiles: group.stages}
    for savings in savings_to_try(config, cluster):
        choice, tiles = group.choice._replace(savings=savings), savings.mlp_tiles
        if tiles not in by_tiles:  # an architecture may refuse tiles
            by_tiles[tiles] = stage_options(config, args, choice, cluster, [])
        if stages := by_tiles[tiles]:
            yield Candidate(choice, [[_with_offload(one, savings) for one in options] for options in stages])


def _with_offload(estimate: Estimate, savings: Savings) -> Estimate:
    """The same estimate with this offload, which no other rule forbids."""
    return estimate.with_config(
        estimate.config.with_keys(
            activation={"offload": savings.offload},
            optimizer={"offload_state": savings.offload_state},
            parallel={"fsdp_cpu_offload": savings.fsdp_cpu_offload},
        )
    )


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
                tried = chosen.with_keys(curriculum={"stages": (with_exchange(alone, cp, strategy),)})
                try:
                    check_measured_lengths(config, stage, f"curriculum.stages[{index}]", cp, choice.tp)
                    options += plan_config(tried, cluster, args)
                except (ConfigError, ContextParallelError) as error:
                    refused.append(error)
        if not options:
            return []
        found.append(options)
    return found
