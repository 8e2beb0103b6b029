"""A stage of a run on a cluster: everything that its memory and time depend on."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from torchtitan_cp.attention import AttentionMask, choose_strategy
from torchtitan_cp.config import Config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.curriculum import StagePlan
from torchtitan_cp.metrics.throughput import layer_costs
from torchtitan_cp.parallel.pipeline import PipelineStages, plan_pipeline
from torchtitan_cp.planner.devices import Cluster
from torchtitan_cp.planner.exchange import Heads, LayerCost, Rates, busiest_layer, check_exchange
from torchtitan_cp.planner.parameters import Parameters, count_parameters, vocabulary_of
from torchtitan_cp.training import registry
from torchtitan_cp.training.resolve import ResolvedRun, resolve_run


@dataclass(frozen=True)
class PlannedStage:
    """A stage on all ranks of a cluster.

    Attributes:
        config: with the stage's tp, pp and activation memory.
        args: ModelArgs with `vocab_size` set.
        degrees: of the mesh in this stage.
    """

    config: Config
    args: Any
    degrees: Degrees
    stage: StagePlan
    cluster: Cluster

    @cached_property
    def tokens(self) -> int:
        """Tokens of one micro-batch on a rank, B S/cp."""
        return self.stage.micro_batch_sequences * self.stage.seq_len // self.stage.cp

    @cached_property
    def element_bytes(self) -> int:
        return 2 if self.config.training.compute_dtype == "bfloat16" else 4

    @cached_property
    def reduce_bytes(self) -> int:
        return 2 if self.config.training.reduce_dtype == "bfloat16" else 4

    @cached_property
    def fused_norm(self) -> bool:
        """See devices.Accelerator; the compiler fuses norms too."""
        return self.cluster.accelerator.fused_norm or self.config.compile.enable

    @cached_property
    def counts(self) -> Parameters:
        """Parameters of a tensor-parallel rank."""
        return count_parameters(self.args, self.degrees.tp)

    @cached_property
    def pipeline(self) -> PipelineStages:
        """The layers of each pipeline rank; the longest stage decides."""
        longest = max([self.stage.seq_len, *(other.seq_len for other in self.config.curriculum.stages)])
        return _pipeline(self.config.parallel, self.degrees.pp, self.args, longest)

    def layer_windows(self, pipeline_rank: int) -> list[int]:
        """The window of each layer on a pipeline rank."""
        spans = (self.pipeline.layers[number] for number in self.pipeline.of_rank(pipeline_rank))
        return [window for start, stop in spans for window in self.args.layer_windows[start:stop]]

    @cached_property
    def strategy(self) -> str:
        """The exchange that `auto` chooses, or the one that is set.

        Raises:
            ConfigError: the planner has no formulas for it.
        """
        strategy = self.stage.strategy
        if strategy == "auto":
            strategy = choose_strategy(self.heads.query, self.heads.key, self.stage.cp, AttentionMask().band)
        return check_exchange(strategy)

    @cached_property
    def all_to_all_ranks(self) -> int:
        """Ranks that trade heads."""
        return self.all_to_all_ranks_of(self.strategy, self.stage.all_to_all_ranks)

    def all_to_all_ranks_of(self, strategy: str, all_to_all_ranks: int) -> int:
        """Ranks that trade heads under a strategy, where hybrid has so many."""
        if strategy == "all_to_all":
            return self.stage.cp
        return all_to_all_ranks if strategy == "hybrid" and self.stage.cp > 1 else 1

    @cached_property
    def heads(self) -> Heads:
        """Heads of a tensor-parallel rank."""
        args, tp = self.args, self.degrees.tp
        return Heads(args.n_heads // tp, args.n_kv_heads // tp, args.head_dim, self.element_bytes)

    @cached_property
    def rates(self) -> Rates:
        """Speed of the attention kernel."""
        dtype, accelerator = self.config.training.compute_dtype, self.cluster.accelerator
        forward = self.cluster.rate(dtype, accelerator.attention_forward)
        backward = self.cluster.rate(dtype, accelerator.attention_backward)
        return Rates(self.cluster, forward, backward, self.degrees.tp)

    def attention(self, strategy: str, all_to_all_ranks: int, window: int) -> LayerCost:
        """Attention of one layer with this window, for one sequence, on the rank that works most."""
        settings = self.config.context_parallel
        float8 = settings.kv_transfer == "float8" and strategy != "all_to_all"
        return busiest_layer(
            self.stage.seq_len,
            self.stage.cp,
            strategy,
            all_to_all_ranks,
            window,
            settings.layout,
            AttentionMask(),
            dataclasses.replace(self.heads, float8=float8),
            self.rates,
        )


@lru_cache(maxsize=512)
def _pipeline(parallel: Any, ranks: int, args: Any, longest: int) -> PipelineStages:
    return plan_pipeline(parallel, ranks, layer_costs(args, longest))


def model_args_of(config: Config) -> Any:
    """The config's ModelArgs with the vocabulary set.

    Raises:
        UserError: an unknown flavor or override, or a tokenizer that cannot be read.
    """
    args = registry.model_args_of(config.model)
    return dataclasses.replace(args, vocab_size=vocabulary_of(config, args))


def resolve_with_vocabulary(config: Config, ranks: int, model_args: Any = None) -> ResolvedRun:
    """The run of a config on so many ranks, without preparing its corpus.

    Args:
        model_args: what `model_args_of` returned, if it is known.

    Raises:
        UserError, ContextParallelError: what a run on so many ranks would refuse.
    """
    run = resolve_run(config, ranks, model_args)
    vocab_size = vocabulary_of(config, run.model_args)
    return dataclasses.replace(run, model_args=dataclasses.replace(run.model_args, vocab_size=vocab_size))


def planned_stages(config: Config, cluster: Cluster, model_args: Any = None) -> tuple[PlannedStage, ...]:
    """The stages of a config on all ranks of a cluster; arguments and errors as of `resolve_with_vocabulary`."""
    run = resolve_with_vocabulary(config, cluster.ranks, model_args)
    return tuple(
        PlannedStage(run.config_of(stage), run.model_args, degrees, stage, cluster)
        for stage, degrees in zip(run.stages, run.degrees, strict=True)
    )
