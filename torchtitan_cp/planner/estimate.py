"""A stage of a config on a cluster: FLOPs, memory, messages, the time of a step and what limits it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torchtitan_cp.attention import AttentionMask, choose_strategy
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.attention.tiles import count_pairs
from torchtitan_cp.config import Config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.curriculum import StagePlan
from torchtitan_cp.metrics import layer_costs
from torchtitan_cp.parallel import bubble_fraction, plan_pipeline
from torchtitan_cp.parallel.pipeline import PipelineStages
from torchtitan_cp.planner.devices import ASYNC_TP_EXPOSED, HOST_BANDWIDTH, Cluster
from torchtitan_cp.planner.exchange import WIDE, Heads, Layer, Rates, Transfer, busiest_layer
from torchtitan_cp.planner.memory import Memory, Part, Setting, block_of, kept, memory_of
from torchtitan_cp.planner.parameters import count_parameters, total_parameters

SECONDS_A_DAY = 86400
# ASSUMED passes of elementwise kernels over a layer's tensors, forward, reads and writes: norms, residual sums and
# their copies over the width; rotation (in fp32) and layout of heads; SwiGLU's two products. Compiled blocks fuse half.
WIDTH_PASSES, HEAD_PASSES, WIDE_PASSES, FUSED = 14, 8, 6, 0.5
COPY_PASSES = 7  # of the rows that are dealt to experts, joined, weighted and summed
LOGIT_PASSES = 6  # of fp32 logits
OPTIMIZER_PASSES = 7  # of fp32 numbers a parameter: weight, two moments read and written, gradient read


@dataclass(frozen=True)
class Volume:
    """What a rank sends for attention under one strategy: in a layer and sequence, and in a step."""

    layer_bytes: float
    step_bytes: float


@dataclass(frozen=True)
class Estimate:
    """One stage of a config on a cluster.

    Attributes:
        strategy: of attention, what `auto` came to.
        parameters: of the network.
        linear_flops, attention_flops: of a step over all ranks, forward and backward, recomputation not counted.
        memory: of the fullest rank; usable_bytes: what it may be.
        seconds: what a step's time goes to -> how long.
        peak_flops: FLOP/s of all ranks.
    """

    stage: StagePlan
    strategy: str
    parameters: int
    linear_flops: float
    attention_flops: float
    memory: Memory
    usable_bytes: float
    seconds: dict[str, float]
    peak_flops: float

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a step in which a rank waits for messages."""
        return sum(value for name, value in self.seconds.items() if name.endswith("messages"))

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.stage.global_batch_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the peak of all ranks; a fraction."""
        return (self.linear_flops + self.attention_flops) / self.step_seconds / self.peak_flops

    @property
    def days(self) -> float:
        """Of the stage."""
        return self.stage.steps * self.step_seconds / SECONDS_A_DAY

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable_bytes

    @property
    def limit(self) -> str:
        """What most of the time goes to, or memory where the stage does not fit."""
        return max(self.seconds, key=lambda name: self.seconds[name]) if self.fits else "memory"


def estimate_stage(config: Config, shape: Any, degrees: Degrees, stage: StagePlan, cluster: Cluster) -> Estimate:
    """Estimate a stage.

    Args:
        config: has passed `check_config`; shape: with `vocab_size` set; degrees: of the mesh.

    Raises:
        ContextParallelError: the strategy does not fit the stage.
    """
    setting = setting_of(config, shape, degrees, stage, cluster)
    stages = stages_of(config, shape, degrees, stage)
    attention = _Attention(config, shape, degrees, stage, cluster)
    linear, pairs = model_flops(shape, stage.seq_len)
    times = [_rank_seconds(shape, setting, stages, rank, degrees, cluster, attention) for rank in range(degrees.pp)]
    ranks = degrees.pp * degrees.dp_replicate * degrees.fsdp * degrees.tp
    return Estimate(
        stage=stage,
        strategy=setting.strategy,
        parameters=total_parameters(shape),
        linear_flops=linear * stage.global_batch_tokens,
        attention_flops=pairs * stage.global_batch_tokens / stage.seq_len,
        memory=stage_memory(config, shape, degrees, stage, cluster),
        usable_bytes=cluster.usable_bytes,
        seconds=max(times, key=lambda seconds: sum(seconds.values())),
        peak_flops=cluster.rate(config.training.compute_dtype, 1.0) * ranks,
    )


def stage_memory(config: Config, shape: Any, degrees: Degrees, stage: StagePlan, cluster: Cluster) -> Memory:
    """The fullest moment of a stage's step on the pipeline rank that holds most."""
    setting = setting_of(config, shape, degrees, stage, cluster)
    parts = parts_of(stages_of(config, shape, degrees, stage), config, stage, degrees.pp)
    return max((memory_of(shape, part, setting) for part in parts), key=lambda memory: memory.total)


def stage_volumes(
    config: Config, shape: Any, degrees: Degrees, stage: StagePlan, cluster: Cluster
) -> dict[str, Volume]:
    """What the rank that sends most sends for attention under each possible strategy."""
    stages = stages_of(config, shape, degrees, stage)
    windows = [layer_windows_of(shape, stages, rank) for rank in range(degrees.pp)]
    return _Attention(config, shape, degrees, stage, cluster).volumes(windows)


def setting_of(config: Config, shape: Any, degrees: Degrees, stage: StagePlan, cluster: Cluster) -> Setting:
    """What a stage's memory and time depend on."""
    strategy = _strategy(shape, degrees, stage)
    return Setting(
        config=config,
        tokens=stage.micro_batch_sequences * stage.seq_len // stage.cp,
        micro_batches=stage.micro_batches,
        tp=degrees.tp,
        fsdp=degrees.fsdp,
        cp=stage.cp,
        strategy=strategy,
        inner=_inner(strategy, stage.cp, stage.all_to_all_ranks),
        fused_norm=cluster.accelerator.fused_norm or config.compile.enable,
    )


def stages_of(config: Config, shape: Any, degrees: Degrees, stage: StagePlan) -> PipelineStages:
    """Which layers each pipeline rank has; they are dealt out by their cost at the longest length."""
    longest = max([stage.seq_len, *(other.seq_len for other in config.curriculum.stages)])
    return _stages(config.parallel, degrees.pp, shape, longest)


def layer_windows_of(shape: Any, stages: PipelineStages, pipeline_rank: int) -> list[int]:
    """The window of each layer that a pipeline rank has."""
    numbers = stages.of_rank(pipeline_rank)
    return [window for number in numbers for window in shape.layer_windows[slice(*stages.layers[number])]]


def model_flops(shape: Any, seq_len: int, mask: AttentionMask | None = None) -> tuple[float, float]:
    """FLOPs of training, recomputation not counted: (of the linear layers a token, of attention a sequence).

    6 a weight, and 12 Hq D for each allowed pair of each layer: two products forward, four backward.
    """
    pairs = sum(mask_pairs(seq_len, window, mask or AttentionMask()) for window in shape.layer_windows)
    return 6.0 * shape.linear_parameters(), 12.0 * shape.n_heads * shape.head_dim * pairs


def mask_pairs(seq_len: int, window: int, mask: AttentionMask) -> int:
    """Allowed (query, key) pairs of a sequence in a layer with this window, 0 for none; the mask's first batch row."""
    banded = AttentionMask(mask.causal, (window - 1, -1) if window else mask.window)
    return sum(count_pairs(stop - start, stop - start, banded.band) for start, stop in mask.documents(seq_len)[0])


def parts_of(stages: PipelineStages, config: Config, stage: StagePlan, ranks: int) -> list[Part]:
    """What each pipeline rank has, and how many micro-batches of activations it holds at once."""
    schedule, parts = config.parallel.pp_schedule, []
    for rank in range(ranks):
        numbers = stages.of_rank(rank)
        layers = sum(stop - start for start, stop in (stages.layers[number] for number in numbers))
        chunks = _chunks_held(schedule, ranks, rank, len(numbers), stage.micro_batches)
        opens, closes = 0 in numbers, len(stages.owner) - 1 in numbers
        parts.append(Part(layers, layers * chunks / len(numbers), opens, closes))
    return parts


def _chunks_held(schedule: str, ranks: int, rank: int, per_rank: int, micro_batches: int) -> int:
    """Forwards of a pipeline stage that wait for their backward at most. Source: Narayanan et al., 2021."""
    everything = micro_batches * per_rank
    if schedule == "gpipe" or ranks == 1:
        return everything if ranks > 1 else 1
    if schedule == "1f1b":
        return min(ranks - rank, everything)
    if schedule == "zbv_zero_bubble":
        return min(2 * ranks, everything)
    return min((per_rank - 1) * ranks + 2 * (ranks - rank - 1) + 1, everything)


@lru_cache(maxsize=512)
def _stages(parallel: Any, ranks: int, shape: Any, longest: int) -> PipelineStages:
    return plan_pipeline(parallel, ranks, layer_costs(shape, longest))


def _strategy(shape: Any, degrees: Degrees, stage: StagePlan) -> str:
    if stage.strategy != "auto":
        return stage.strategy
    heads = shape.n_heads // degrees.tp, shape.n_kv_heads // degrees.tp
    return choose_strategy(*heads, stage.cp, AttentionMask().band)


def _inner(strategy: str, cp: int, all_to_all_ranks: int) -> int:
    if strategy == "all_to_all":
        return cp
    return all_to_all_ranks if strategy == "hybrid" and cp > 1 else 1


class _Attention:
    """Attention of the layers of a stage, by strategy, on the rank that works most."""

    def __init__(self, config: Config, shape: Any, degrees: Degrees, stage: StagePlan, cluster: Cluster) -> None:
        self.stage, self.shape, self.settings = stage, shape, config.context_parallel
        dtype, accelerator = config.training.compute_dtype, cluster.accelerator
        self.element_bytes = 2 if dtype == "bfloat16" else 4
        self.heads = Heads(shape.n_heads // degrees.tp, shape.n_kv_heads // degrees.tp, shape.head_dim)
        self.rates = Rates(
            cluster,
            cluster.rate(dtype, accelerator.attention_forward),
            cluster.rate(dtype, accelerator.attention_backward),
            degrees.tp,
        )
        self.forwards = 2 if config.activation.checkpoint == "full" else 1

    def layer(self, strategy: str, inner: int, window: int) -> Layer:
        """One layer with this window, for one sequence."""
        transfer = Transfer(self.element_bytes, self.settings.kv_transfer == "float8" and strategy != "all_to_all")
        return busiest_layer(
            self.stage.seq_len,
            self.stage.cp,
            strategy,
            inner,
            window,
            self.settings.layout,
            AttentionMask(),
            self.heads,
            transfer,
            self.rates,
        )

    def volumes(self, windows: Sequence[Sequence[int]]) -> dict[str, Volume]:
        """See stage_volumes. windows: of each pipeline rank's layers."""
        found, times = {}, self.stage.micro_batches * self.stage.micro_batch_sequences
        for strategy in STRATEGIES:
            inner = _inner(strategy, self.stage.cp, self._hybrid_ranks())
            if strategy == "hybrid" and inner in (1, self.stage.cp):
                continue
            layers = {window: self.layer(strategy, inner, window) for window in set(self.shape.layer_windows)}
            every = [layers[window] for window in self.shape.layer_windows]
            mean = sum(layer.forward_bytes + layer.backward_bytes for layer in every) / len(every)
            sent = {
                window: self.forwards * layer.forward_bytes + layer.backward_bytes for window, layer in layers.items()
            }
            step = max(sum(sent[window] for window in own) for own in windows)
            found[strategy] = Volume(mean, step * times)
        return found

    def _hybrid_ranks(self) -> int:
        asked = self.stage.all_to_all_ranks if self.stage.strategy == "hybrid" else self.settings.all_to_all_ranks
        return asked if self.stage.cp % asked == 0 else 1


def _rank_seconds(
    shape: Any,
    setting: Setting,
    stages: PipelineStages,
    pipeline_rank: int,
    degrees: Degrees,
    cluster: Cluster,
    attention: _Attention,
) -> dict[str, float]:
    """Seconds of a step of one pipeline rank, by what they go to."""
    config, stage = setting.config, attention.stage
    numbers, windows = stages.of_rank(pipeline_rank), layer_windows_of(shape, stages, pipeline_rank)
    part = parts_of(stages, config, stage, degrees.pp)[pipeline_rank]
    total: dict[str, float] = {}
    for window in set(windows):
        layer = attention.layer(setting.strategy, setting.inner, window)
        for name, value in _layer_seconds(shape, setting, degrees, cluster, layer, attention.rates).items():
            total[name] = total.get(name, 0.0) + windows.count(window) * value * stage.micro_batches
    for name, value in _ends_seconds(shape, setting, part, cluster, len(numbers), degrees).items():
        total[name] = total.get(name, 0.0) + value
    if degrees.pp > 1:
        share = bubble_fraction(config.parallel, degrees.pp, len(numbers), stage.micro_batches)
        total["pipeline bubble"] = sum(total.values()) * share / (1 - share)
    counts = count_parameters(shape, degrees.tp)
    own = part.layers * counts.block + counts.ends(part.opens, part.closes, shape.tie_embeddings)
    total["optimizer"] = _optimizer_seconds(config, own / degrees.fsdp, cluster)
    return total


def _layer_seconds(
    shape: Any, setting: Setting, degrees: Degrees, cluster: Cluster, layer: Layer, rates: Rates
) -> dict[str, float]:
    """Seconds of one layer and micro-batch, forward, backward and what is run again."""
    config, tokens, tp = setting.config, setting.tokens, setting.tp
    mode, tiles, sequences = (
        config.activation.checkpoint,
        config.activation.mlp_tiles,
        config.training.micro_batch_sequences,
    )
    counts = count_parameters(shape, tp)
    product_rate = cluster.rate(config.training.compute_dtype, cluster.accelerator.linear)
    forward = 2 * counts.token_matrices * tokens / product_rate
    mlp = 2 * 3 * shape.dim * shape.token_ffn_dim / tp * tokens / product_rate
    # Tiles run again for themselves, and before that with a block that is.
    in_tiles = 0.0 if tiles == 1 else mlp
    again = {"none": 0.0, "selective": in_tiles}.get(mode, forward)
    linear_backward = 2 * forward + again + in_tiles
    scores = 4 * shape.head_dim * layer.pairs * sequences
    attention_forward = scores / rates.forward
    attention_backward = 2.5 * scores / rates.backward + (attention_forward if mode == "full" else 0.0)
    moved = cluster.memory_seconds(_elementwise_bytes(shape, setting))
    recomputed = 0.0 if mode == "none" else 1.0
    trade_again = layer.forward_exposed if mode == "full" else 0.0
    cp_forward = layer.forward_exposed * sequences
    cp_backward = (layer.backward_exposed + trade_again) * sequences
    message = cluster.collective_seconds(tokens * shape.dim * setting.element_bytes, tp, 1)
    tp_share = ASYNC_TP_EXPOSED if config.parallel.async_tp else 1.0
    tp_forward, tp_backward = 4 * message * tp_share, 4 * message * (1 + recomputed) * tp_share
    busy_forward = forward + attention_forward + moved + cp_forward + tp_forward
    busy_backward = linear_backward + attention_backward + moved * (2 + recomputed) + cp_backward + tp_backward
    return {
        "linear layers": forward + linear_backward,
        "attention": attention_forward + attention_backward,
        "elementwise kernels": moved * (3 + recomputed),
        "context-parallel messages": cp_forward + cp_backward,
        "tensor-parallel messages": tp_forward + tp_backward,
        "FSDP messages": _fsdp_exposed(counts.block, setting, degrees, cluster, busy_forward, busy_backward),
        "offload messages": _offload_exposed(shape, setting, busy_forward, busy_backward),
    }


def _elementwise_bytes(shape: Any, setting: Setting) -> float:
    """Bytes that elementwise kernels move in a layer's forward."""
    heads = (shape.n_heads + shape.n_kv_heads) * shape.head_dim
    values = WIDTH_PASSES * shape.dim + HEAD_PASSES * heads + WIDE_PASSES * shape.token_ffn_dim
    values += COPY_PASSES * shape.token_copies * shape.dim
    fused = FUSED if setting.config.compile.enable else 1.0
    return setting.tokens * values / setting.tp * setting.element_bytes * fused


def _fsdp_exposed(
    parameters: int, setting: Setting, degrees: Degrees, cluster: Cluster, forward: float, backward: float
) -> float:
    """What of a layer's gathers and reductions does not hide behind a layer's work; in a pipeline once a step."""
    gather = cluster.collective_seconds(parameters * setting.element_bytes, degrees.fsdp, degrees.tp)
    reduce = cluster.collective_seconds(parameters * setting.reduce_bytes, degrees.fsdp, degrees.tp)
    shard = parameters * setting.reduce_bytes / degrees.fsdp
    reduce += 2 * cluster.collective_seconds(shard, degrees.dp_replicate, degrees.tp * degrees.fsdp)
    how = setting.config.parallel.fsdp_reshard
    if degrees.pp > 1:
        # Freed by each forward, its weights are gathered again for the next one.
        gathers = 1.0 if how == "always" else 1 / setting.micro_batches
        return max(0.0, gather - forward) * gathers + max(0.0, reduce - backward) / setting.micro_batches
    twice = gather if how != "never" else 0.0
    return max(0.0, gather - forward) + max(0.0, twice + reduce - backward)


def _offload_exposed(shape: Any, setting: Setting, forward: float, backward: float) -> float:
    """What of the copies to host memory and back does not hide behind a layer's work."""
    activation = setting.config.activation
    if not activation.offload:
        return 0.0
    on_device = dataclasses.replace(setting.config, activation=dataclasses.replace(activation, offload=False))
    on_device_setting = dataclasses.replace(setting, config=on_device)
    copied = sum(kept(block_of(shape, setting), shape, on_device_setting)) / HOST_BANDWIDTH
    return max(0.0, copied - forward) + max(0.0, copied - backward)


def _ends_seconds(
    shape: Any, setting: Setting, part: Part, cluster: Cluster, pipeline_stages: int, degrees: Degrees
) -> dict[str, float]:
    """Output layer and loss, the ends' weights, and hidden states between pipeline ranks; of a step."""
    config, tokens, times = setting.config, setting.tokens, setting.micro_batches
    counts = count_parameters(shape, setting.tp)
    ends = counts.ends(part.opens, part.closes, shape.tie_embeddings)
    matrix = -(-shape.vocab_size // setting.tp) * shape.dim if part.closes else 0
    logits = tokens * matrix / shape.dim * WIDE * LOGIT_PASSES
    rate = cluster.rate(config.training.compute_dtype, cluster.accelerator.linear)
    weights = cluster.collective_seconds(ends * setting.element_bytes, degrees.fsdp, degrees.tp)
    gradients = cluster.collective_seconds(ends * setting.reduce_bytes, degrees.fsdp, degrees.tp)
    hidden = tokens * shape.dim * setting.element_bytes
    seconds = {
        "linear layers": 6 * matrix * tokens * times / rate,
        "elementwise kernels": cluster.memory_seconds(logits) * times,
        "FSDP messages": (weights + gradients) * (times if degrees.pp == 1 else 1),
        "tensor-parallel messages": 4 * cluster.collective_seconds(hidden, setting.tp, 1) * times,
    }
    if degrees.pp > 1:
        stride = degrees.dp_replicate * degrees.fsdp * degrees.tp
        one = cluster.message_seconds(hidden / setting.tp, degrees.pp, stride)
        seconds["pipeline messages"] = 2 * pipeline_stages * times * one
    return seconds


def _optimizer_seconds(config: Config, shard: float, cluster: Cluster) -> float:
    moved = shard * WIDE * OPTIMIZER_PASSES
    if config.parallel.fsdp_cpu_offload or config.optimizer.offload_state:
        return moved / HOST_BANDWIDTH
    return cluster.memory_seconds(moved)
