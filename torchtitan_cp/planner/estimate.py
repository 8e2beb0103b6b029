"""A stage of a config on a cluster: FLOPs, memory, messages, the time of a step and what limits it."""

from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from torchtitan_cp.attention.ring_cost import BACKWARD_FLOPS, FORWARD_FLOPS
from torchtitan_cp.config import Config
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.metrics.throughput import flops_per_token
from torchtitan_cp.parallel.pipeline_stages import bubble_fraction
from torchtitan_cp.planner.devices import ASYNC_TP_EXPOSED, Cluster
from torchtitan_cp.planner.host import host_memory
from torchtitan_cp.planner.memory import Memory, rank_memory
from torchtitan_cp.planner.offload import HOST_UPDATE, OFFLOAD, exposed_copies, exposed_outer_copies, update_seconds
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.planner.recurrence import recurrence_seconds
from torchtitan_cp.planner.stage import PlannedRank, PlannedStage
from torchtitan_cp.planner.strategy_costs import FP32_BYTES, STRATEGY_COSTS, LayerCost
from torchtitan_cp.training.resolve import resolve_run

SECONDS_A_DAY = 86400
# ASSUMED number of reads and writes of a layer's tensors by elementwise kernels in a forward: norms, residual sums and
# their copies over the width E; rotation (in fp32) and layout of heads; SwiGLU's two products. Compiled blocks do half.
WIDTH_PASSES, HEAD_PASSES, FFN_PASSES, FUSED = 14, 8, 6, 0.5
COPY_PASSES = 7  # over rows that are dispatched to experts, joined, weighted and summed
LOGIT_PASSES = 15  # over fp32 logits, measured on an H200
# Bytes that move for a weight that is dequantized: half a byte of code, and its index and its value, written and read.
# The weight that the product reads is written too.
DEQUANTIZED_BYTES = 0.5 + 2 * 2 + 2 * 2


class Volume(NamedTuple):
    """Bytes that a rank sends for attention under one strategy: for a layer and sequence, and in a step."""

    layer_bytes: float
    step_bytes: float


class Need(NamedTuple):
    """Memory that a stage needs of a device or a host, and what is usable, in bytes; `of` says whose memory it is."""

    of: str
    needed_bytes: float
    usable_bytes: float

    @property
    def over_bytes(self) -> float:
        return self.needed_bytes - self.usable_bytes


class Estimate(PlannedStage):
    """A stage, and estimates of it that are computed when they are first read."""

    def with_config(self, config: Config) -> "Estimate":
        """The stage with other settings of what is kept or offloaded, which change nothing of the model's parts."""
        other = replace(self, config=config)
        vars(other).update({name: vars(self)[name] for name in ("counts", "ranks") if name in vars(self)})
        return other

    @property
    def linear_flops(self) -> float:
        """FLOPs of a step over all ranks, forward and backward, without attention and recomputation."""
        no_keys = [0.0] * self.args.n_layers
        changed = self.trained.flops if self.trained else 0.0
        return flops_per_token(self.args, self.stage.seq_len, no_keys, changed) * self.stage.global_batch_tokens

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention in a step, counted as a run counts them for its MFU."""
        linear = flops_per_token(self.args, self.stage.seq_len, [0.0] * self.args.n_layers)
        return (flops_per_token(self.args, self.stage.seq_len) - linear) * self.stage.global_batch_tokens

    @cached_property
    def memory(self) -> Memory:
        """The peak of a step on the pipeline rank that holds most."""
        phases = (memory for pp_rank in self.ranks for memory in rank_memory(self, pp_rank))
        return max(phases, key=lambda memory: memory.total)

    @cached_property
    def host(self) -> dict[str, float]:
        """Bytes of host memory of a node, by kind."""
        return host_memory(self)

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """Of a device, and of a node's host if its memory is known."""
        device = Need("device memory", self.memory.total, self.cluster.usable_bytes)
        host = Need("a node's host memory", sum(self.host.values()), self.cluster.usable_host_bytes)
        return (device, host) if self.cluster.accelerator.host_bytes else (device,)

    @property
    def fits_device(self) -> bool:
        return self.needs[0].over_bytes <= 0

    @property
    def fits_host(self) -> bool:
        """Whether a node's host memory is enough, or not known."""
        return all(need.over_bytes <= 0 for need in self.needs[1:])

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host

    @property
    def fullness(self) -> tuple[float, float]:
        """How full memory is, to compare: what is lacking as fractions of what is usable, then the largest fraction."""
        shares = [need.needed_bytes / need.usable_bytes for need in self.needs]
        return sum(max(0.0, share - 1) for share in shares), max(shares)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step on the slowest pipeline rank, by what they are spent on."""
        return max((_rank_seconds(self, pp_rank) for pp_rank in self.ranks), key=lambda seconds: sum(seconds.values()))

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a step in which a rank waits for messages."""
        return sum(value for name, value in self.seconds.items() if name.endswith("messages"))

    @property
    def offload_seconds(self) -> float:
        """Seconds of a step that offload costs: copies that nothing hides, and the longer update on the host."""
        return self.seconds.get(OFFLOAD, 0.0) + self.seconds.get(HOST_UPDATE, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole job."""
        return self.stage.global_batch_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the peak of all ranks; a fraction."""
        peak = self.cluster.rate(self.config.training.compute_dtype, 1.0) * self.cluster.ranks
        return (self.linear_flops + self.attention_flops) / self.step_seconds / peak

    @property
    def days(self) -> float:
        """Duration of the stage."""
        return self.stage.steps * self.step_seconds / SECONDS_A_DAY

    @property
    def limit(self) -> str:
        """What most of the time is spent on, or memory if the stage does not fit."""
        return max(self.seconds, key=lambda name: self.seconds[name]) if self.fits else "memory"

    @cached_property
    def volumes(self) -> dict[str, Volume]:
        """Bytes that the busiest sender sends for attention, by strategy; hybrid only if it is possible."""
        stage, inner = self.stage, self.config.context_parallel.all_to_all_ranks
        windows = [window for pp_rank in self.ranks for window in pp_rank.windows]
        forwards = 2 if self.config.activation.checkpoint == "full" else 1
        volumes = {}
        for strategy in STRATEGY_COSTS:
            if strategy == "hybrid" and (inner in (1, stage.cp) or stage.cp % inner):
                continue
            costs = {window: self.attention(strategy, window) for window in set(windows)}
            mean = sum(costs[window].forward_bytes + costs[window].backward_bytes for window in windows) / len(windows)
            sent = {window: forwards * cost.forward_bytes + cost.backward_bytes for window, cost in costs.items()}
            step = max(sum(sent[window] for window in pp_rank.windows) for pp_rank in self.ranks)
            volumes[strategy] = Volume(mean, step * (stage.micro_batches * stage.micro_batch_sequences))
        return volumes


# Inactive on a CPU, where everything is in host memory.
OFFLOADS = {
    "parallel": {"fsdp_cpu_offload": False},
    "optimizer": {"offload_state": False},
    "activation": {"offload": False},
}


def plan_config(config: Config, cluster: Cluster, model_args: ModelArgs | None = None) -> tuple[Estimate, ...]:
    """An estimate of each stage of a config on all ranks of a cluster, without preparing its corpus.

    Args:
        model_args: result of `sized_model_args`, if the caller has it.

    Raises:
        UserError, ContextParallelError: a run on so many ranks would refuse the config.
    """
    on_gpu = cluster.accelerator.capability is not None
    args = model_args or sized_model_args(config)
    run = resolve_run(config, cluster.ranks, args, device="cuda" if on_gpu else "cpu")
    inactive: dict[str, dict[str, bool]] = {} if on_gpu else OFFLOADS
    return tuple(
        Estimate(run.config_of(stage).with_keys(**inactive), run.model_args, stage, cluster) for stage in run.stages
    )


def _rank_seconds(planned: PlannedStage, pp_rank: PlannedRank) -> dict[str, float]:
    """Seconds of a step of one pipeline rank, by what they are spent on."""
    config, stage, degrees = planned.config, planned.stage, planned.degrees
    layers = [
        (count, _layer_seconds(planned, planned.attention(planned.layer_strategy(window), window), window))
        for window, count in Counter(pp_rank.windows).items()
    ]
    if states := pp_rank.layers - len(pp_rank.windows):
        # Messages of states are not counted; they were below half a percent of a step in every recipe.
        layer = _layer_seconds(planned, LayerCost(0, 0.0, 0.0, 0.0, 0.0), 0)
        layer["attention"] += recurrence_seconds(planned)
        layers.append((states, layer))
    total = _outer_seconds(planned, pp_rank)
    for count, layer in layers:
        for name, seconds in layer.items():
            total[name] = total.get(name, 0.0) + count * stage.micro_batches * seconds
    if degrees.pp > 1:
        share = bubble_fraction(config.parallel, degrees.pp, pp_rank.pipeline_stages, stage.micro_batches)
        total["pipeline bubble"] = sum(total.values()) * share / (1 - share)
    for name, seconds in update_seconds(planned, pp_rank).items():
        total[name] = total.get(name, 0.0) + seconds
    return total


def _tiles_again(planned: PlannedStage) -> float:
    """How often an MLP in tiles runs beside its forward, counted on a CPU; see parallel.activation.tiled."""
    if planned.compiled.mlp:
        return 2 / 3  # not its last product
    tiles, is_recomputed = planned.config.activation.mlp_tiles, planned.config.activation.checkpoint != "none"
    return 1.0 + (is_recomputed * (tiles - 1) / tiles if planned.counts.experts else 0.0)


def _layer_seconds(planned: PlannedStage, attention: LayerCost, window: int) -> dict[str, float]:
    """Seconds of one layer with this window and one micro-batch, forward, backward and recomputation."""
    config, args, cluster, rates = planned.config, planned.args, planned.cluster, planned.rates(window)
    tokens, tp, sequences = planned.tokens, planned.degrees.tp, planned.stage.micro_batch_sequences
    mode, tiles = config.activation.checkpoint, config.activation.mlp_tiles
    product_rate = cluster.rate(config.training.compute_dtype, cluster.accelerator.linear)
    lora = planned.trained
    weights = planned.counts.active_matrices + (lora.adapters if lora else 0.0)
    # The backward computes gradients of inputs, and of those weights that are trained.
    trained_weights = lora.active_block + lora.adapters if lora else weights
    forward, backward = (2 * count * tokens / product_rate for count in (weights, weights + trained_weights))
    mlp = 2 * 3 * args.dim * args.active_ffn_dim / tp * tokens / product_rate
    last = 2 * planned.unrepeated_product * tokens / product_rate
    last_of_attention = 2 * planned.unrepeated_attention_product * tokens / product_rate
    again = 0.0 if mode in ("none", "selective") else forward - last - last_of_attention
    if tiles > 1:  # each runs again for itself
        again += _tiles_again(planned) * mlp - (mlp - last if again else 0.0)
    linear_backward = backward + again
    scores = planned.mixer(window).head_dim * attention.pairs * sequences
    attention_forward = FORWARD_FLOPS * scores / rates.forward
    attention_backward = BACKWARD_FLOPS * scores / rates.backward + (attention_forward if mode == "full" else 0.0)
    moved = cluster.memory_seconds(_elementwise_bytes(planned))
    # Each tile of an MLP dequantizes its weights again; counted as if attention had tiles too.
    unpacked = planned.quantized_block * (DEQUANTIZED_BYTES + planned.element_bytes) * config.activation.mlp_tiles
    unpacked = cluster.memory_seconds(unpacked)
    recomputed = 0.0 if mode == "none" else 1.0
    trade_again = attention.forward_exposed if mode == "full" else 0.0
    cp_forward = attention.forward_exposed * sequences
    cp_backward = (attention.backward_exposed + trade_again) * sequences
    message = cluster.collective_seconds(tokens * args.dim * planned.element_bytes, tp, 1)
    tp_forward = 4 * message * (ASYNC_TP_EXPOSED if config.parallel.async_tp else 1.0)
    tp_backward = tp_forward * (1 + recomputed)
    ep = planned.degrees.ep
    trade = cluster.all_to_all_seconds(planned.sent_to_experts * (ep - 1) / ep, ep, tp)
    busy_forward = forward + attention_forward + moved + unpacked + cp_forward + tp_forward
    busy_backward = linear_backward + attention_backward + cp_backward + tp_backward
    busy_backward += moved * (2 + recomputed) + unpacked * (1 + recomputed)
    return {
        "linear layers": forward + linear_backward,
        "attention": attention_forward + attention_backward,
        "elementwise kernels": moved * (3 + recomputed) + unpacked * (2 + recomputed),
        "context-parallel messages": cp_forward + cp_backward,
        "tensor-parallel messages": tp_forward + tp_backward,
        "expert-parallel messages": planned.expert_sends_per_micro_batch * trade,
        "FSDP messages": _fsdp_exposed(planned, busy_forward, busy_backward),
        OFFLOAD: exposed_copies(planned, busy_forward, busy_backward),
    }


def _elementwise_bytes(planned: PlannedStage) -> float:
    """Bytes that elementwise kernels move in a layer's forward."""
    args = planned.args
    heads = (args.n_heads + args.n_kv_heads) * args.head_dim
    width = WIDTH_PASSES / 2 * args.dim  # half a layer's
    attention, gate = width + HEAD_PASSES * heads, FFN_PASSES * args.active_ffn_dim
    others = width + COPY_PASSES * args.experts_per_token * args.dim
    passes = zip((attention, others, gate), planned.compiled, strict=True)
    values = sum(part * (FUSED if compiled else 1.0) for part, compiled in passes)
    return planned.tokens * values / planned.degrees.tp * planned.element_bytes


def _fsdp_exposed(planned: PlannedStage, forward: float, backward: float) -> float:
    """Seconds of a layer's gathers and reductions that its work does not hide; in a pipeline they come once a step."""
    gather, reduce, reduce_last = _fsdp_seconds(planned, planned.gathered_block_bytes, planned.reduced_block)
    if planned.degrees.pp > 1:
        # If each forward frees the weights, the next one gathers them again.
        gathers = 1.0 if planned.config.parallel.fsdp_reshard == "always" else 1 / planned.stage.micro_batches
        return max(0.0, gather - forward) * gathers + max(0.0, reduce_last - backward) / planned.stage.micro_batches
    stays = planned.config.parallel.fsdp_reshard == "never"  # gathered, until the step's last backward
    gathers, twice = (1 / planned.stage.micro_batches, 0.0) if stays else (1.0, gather)
    others, last = (max(0.0, twice + sent - backward) for sent in (reduce, reduce_last))
    return max(0.0, gather - forward) * gathers + others + (last - others) / planned.stage.micro_batches


def _fsdp_seconds(planned: PlannedStage, gathered: float, trained: float) -> tuple[float, float, float]:
    """Time to gather bytes, to reduce gradients of trained parameters, and to reduce those of the last micro-batch.

    The gradients of the last micro-batch, or of all if `sync_once_per_step` is false, are also summed
    over replicas.
    """
    degrees, collective_seconds = planned.degrees, planned.cluster.collective_seconds
    gather = collective_seconds(gathered, degrees.fsdp, degrees.tp)
    reduce = collective_seconds(trained * planned.reduce_bytes, degrees.fsdp, degrees.tp)
    shard = trained * planned.reduce_bytes / degrees.fsdp
    last = reduce + 2 * collective_seconds(shard, degrees.dp_replicate, degrees.tp * degrees.fsdp)
    return gather, reduce if planned.config.sync_once_per_step else last, last


def _outer_seconds(planned: PlannedStage, pp_rank: PlannedRank) -> dict[str, float]:
    """Seconds of a step for the output layer and loss, the outer parameters, and messages between pipeline ranks."""
    args, degrees, cluster = planned.args, planned.degrees, planned.cluster
    tokens, times = planned.tokens, planned.stage.micro_batches
    matrix = -(-args.vocab_size // degrees.tp) * args.dim if pp_rank.is_last else 0
    fused = FUSED if planned.config.compile.enable and degrees.tp == 1 else 1.0
    logits = tokens * matrix / args.dim * FP32_BYTES * LOGIT_PASSES * fused
    rate = cluster.rate(planned.config.training.compute_dtype, cluster.accelerator.linear)
    hidden = tokens * args.dim * planned.element_bytes
    gathered, outer = pp_rank.outer_parameters * planned.element_bytes, planned.trained_outer(pp_rank)
    gather, reduce, reduce_last = _fsdp_seconds(planned, gathered, outer)
    again = 0.0 if planned.config.parallel.fsdp_reshard == "never" else gather
    seconds = {
        "linear layers": (6 if planned.trains_output else 4) * matrix * tokens * times / rate,
        "elementwise kernels": cluster.memory_seconds(logits) * times,
        "FSDP messages": gather + reduce_last + (again + reduce) * (times - 1 if degrees.pp == 1 else 0),
        "tensor-parallel messages": 4 * cluster.collective_seconds(hidden, planned.degrees.tp, 1) * times,
        OFFLOAD: exposed_outer_copies(planned, pp_rank),
    }
    if degrees.pp > 1:
        stride = degrees.dp_replicate * degrees.fsdp * degrees.tp
        one = cluster.message_seconds(hidden / planned.degrees.tp, degrees.pp, stride)
        seconds["pipeline messages"] = 2 * pp_rank.pipeline_stages * times * one
    return seconds
