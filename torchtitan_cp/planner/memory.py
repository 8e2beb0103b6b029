"""Memory of a rank in each phase of a step, by kind. Formulas and reasons: docs/memory.md, docs/planner.md."""

from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan_cp.optim.optimizers import ADAMW, OPTIMIZERS, OptimizerKind
from torchtitan_cp.parallel.nf4 import GROUP, GROUPS_AT_ONCE, LOOKUP_BYTES, WEIGHT_BYTES
from torchtitan_cp.planner.recurrence import recurrence_phases
from torchtitan_cp.planner.stage import PlannedRank, PlannedStage
from torchtitan_cp.planner.strategy_costs import FP32_BYTES, RING, STRATEGY_COSTS

BF16_BYTES = 2  # of BASE_DTYPE in parallel/lora.py, which imports DTensor
KINDS = ("weights", "gradients", "optimizer", "block_inputs", "attention", "mlp", "loss", "communication")


Phase = tuple[str, dict[str, float]]
"""Name of a phase, and the bytes by kind that exist only in it."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by kind in a phase of a step."""

    phase: str
    by_kind: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one layer's tensors on a rank for one micro-batch. It is the mean if some layers have a recurrent state.

    Attributes:
        stream: the layer's input, which tp cuts along the sequence.
        first_norm, second_norm: what a norm keeps, and its gathered output; the first norm's input is the stream.
        more_norms: what norms beyond these two keep, half of them behind the attention and half behind the MLP.
        qkv: rotated q, k and v, 0 if an all-to-all keeps its own; unrotated_qkv: the same before the rotation.
        normed_qk: what norms of q and k keep, which is q and k before the rotation.
        out: output of the attention, and log-sum-exp.
        all_to_all: what an all-to-all keeps.
        ffn: the MLP's four tensors of ffn_dim.
        copies: rows that are sent to experts, and the rows that come back.
    """

    stream: float
    first_norm: float
    second_norm: float
    more_norms: float
    qkv: float
    unrotated_qkv: float
    normed_qk: float
    out: float
    all_to_all: float
    ffn: float
    copies: float


def block_bytes(planned: PlannedStage) -> BlockBytes:
    """Sizes of a layer's tensors."""
    args, heads, tp = planned.args, planned.heads, planned.degrees.tp
    e, c, tokens = args.dim, planned.element_bytes, planned.tokens
    query, key = args.n_heads * args.head_dim / tp, args.n_kv_heads * args.head_dim / tp
    stream = e / tp * c
    # A norm keeps its input, or if it is not fused two fp32 copies (in fp32 one is the input). Its output is gathered.
    by_norm = stream if planned.fused_norm else 2 * FP32_BYTES * e / tp
    first = by_norm + e * c - (stream if planned.fused_norm or c == FP32_BYTES else 0)
    second = by_norm + (stream if args.n_experts else e * c)  # experts take the rows of their own rank
    ranks = planned.all_to_all_ranks(planned.strategy)
    traded, all_to_all = heads.after_all_to_all(ranks), 0.0
    qkv = unrotated_qkv = tokens * (query + 2 * key) * c
    out = tokens * (query * c + heads.query * FP32_BYTES)
    if ranks > 1:
        qkv = 0.0
        all_to_all = tokens * ranks * (2 * (traded.query + traded.key) * traded.dim * c + traded.query * FP32_BYTES)
    norm_bytes = c if planned.fused_norm else 2 * FP32_BYTES
    normed_qk = tokens * (query + key) * norm_bytes if planned.counts.qk_norm else 0.0
    if recurrence := planned.recurrence:
        share = sum(mixer.state_size > 0 for mixer in args.mixers) / args.n_layers
        normed_qk *= 1 - share
        # A gated delta net keeps q, k and v before and after their convolution, its gate three times (as it is, in fp32
        # and after the SiLU), and the norm and the product of its output.
        channels, values = recurrence.state_channels, recurrence.state_values
        kept = tokens * (2 * channels * c + 3 * values * c + 2 * values * FP32_BYTES)
        unrotated_qkv = qkv * (1 - share) + tokens * (channels + values) * c * share
        qkv, out = qkv * (1 - share) + kept * share, out * (1 - share) + tokens * values * c * share
        all_to_all *= 1 - share
    return BlockBytes(
        stream=tokens * stream,
        first_norm=tokens * first,
        second_norm=tokens * second,
        more_norms=tokens * by_norm * planned.counts.more_norms,
        qkv=qkv,
        unrotated_qkv=unrotated_qkv,
        normed_qk=normed_qk,
        out=out,
        all_to_all=all_to_all,
        ffn=tokens * 4 * args.active_ffn_dim / tp * c,
        copies=tokens * 2 * args.experts_per_token * e * c / tp,
    )


def _repeated_keys_bytes(planned: PlannedStage) -> float:
    """Bytes of what the kernel `efficient` repeats for every query head of a group: keys, values, their gradients."""
    heads = planned.heads
    if heads.query == heads.key or planned.kernel(0) != "efficient":
        return 0.0
    return 4 * planned.tokens * heads.query * heads.dim * planned.element_bytes


def kept_bytes(planned: PlannedStage, block: BlockBytes) -> tuple[float, float, float]:
    """Bytes that a layer keeps for its backward, on the device or offloaded: (block inputs, attention, MLP)."""
    mode, tiles = planned.config.activation.checkpoint, planned.config.activation.mlp_tiles
    attention = block.out + block.all_to_all
    inputs = block.stream * (2 if planned.compiled.halves else 1)
    if mode == "full":
        return inputs, 0.0, 0.0
    if mode == "attention_saved":
        return inputs, attention, 0.0
    if mode == "selective":
        # It keeps the results of products: unrotated q, k, v; rows of the width E from wo and w2; two of the MLP's
        # tensors from w1 and w3; and from the product that joins the rows that come back from experts.
        width = block.stream * planned.degrees.tp
        joined = width if planned.sent_to_experts else 0.0
        ffn = 0.0 if tiles > 1 else block.ffn / 2 + (block.copies / 2 or width) + joined
        # The input of a second half that is recomputed by itself takes the place of wo's rows.
        inputs = inputs if planned.compiled.halves else block.stream + width
        return inputs, attention + block.unrotated_qkv, ffn
    inputs = block.stream + block.first_norm + _second_norm_kept(block, tiles) + block.more_norms
    return inputs, attention + block.qkv + block.normed_qk, 0.0 if tiles > 1 else block.ffn + block.copies


def _second_norm_kept(block: BlockBytes, tiles: int) -> float:
    """What a layer keeps of its second norm if it is not recomputed; with tiles, only the norm's input."""
    # The balance of experts needs the norm's output once more.
    again = block.second_norm - block.stream if block.copies else 0.0
    return again + (block.second_norm if tiles == 1 else block.stream)


def rank_memory(planned: PlannedStage, pp_rank: PlannedRank) -> Iterator[Memory]:
    """Memory in those phases of a step on a pipeline rank that may be the peak."""
    weights, block = _gathered_weights(planned, pp_rank), block_bytes(planned)
    kept, offload = kept_bytes(planned, block), planned.config.activation.offload
    in_block = _block_phases(planned, pp_rank, block, kept, weights)
    layer = dict(zip(("block_inputs", "attention", "mlp"), kept, strict=True))
    at_first = at_last = shards = _shards(planned, pp_rank)
    if planned.stage.micro_batches == 1 or planned.degrees.pp > 1:
        # Gradients are reduced once a step: a layer's shard exists once the layer has run backward.
        at_first = shards | {"gradients": 0.0}
        at_last = shards | {"gradients": shards["gradients"] * (1 - 1 / pp_rank.layers)}
    between = _between_pipeline_stages(planned, pp_rank, block)
    for kept_layers, whole_gradients in _held_in_pipeline(planned, pp_rank):
        waiting = {"communication": between + whole_gradients}
        activations = {kind: 0.0 if offload else kept_layers * size for kind, size in layer.items()}
        in_backward = layer if offload else activations  # the layer that runs has fetched its own
        for name, extra in _loss_phases(planned, pp_rank, weights):
            yield _memory(name, at_first, activations, waiting, extra)
        for name, extra in in_block:
            yield _memory(f"{name} of the first layer backward", at_first, in_backward, waiting, extra)
        if kept_layers == pp_rank.layers:
            # One micro-batch at a time: when the last layer runs backward, the activations of the others are freed.
            for name, extra in in_block:
                yield _memory(f"{name} of the last layer backward", at_last, layer, waiting, extra)


def _memory(phase: str, *parts: dict[str, float]) -> Memory:
    """The sum of parts by kind."""
    return Memory(phase, {kind: sum(part.get(kind, 0.0) for part in parts) for kind in KINDS})


def _shards(planned: PlannedStage, pp_rank: PlannedRank) -> dict[str, float]:
    """Bytes on the device of a rank's shards of weights, gradients and optimizer state."""
    config, fsdp = planned.config, planned.degrees.fsdp
    if config.parallel.fsdp_cpu_offload:
        return {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    trained = pp_rank.trained / fsdp * FP32_BYTES
    state = 0.0 if config.optimizer.offload_state else state_bytes(planned, pp_rank)
    return {"weights": weight_bytes(planned, pp_rank), "gradients": trained, "optimizer": state}


def stored_bytes(trained: float, frozen: float, quantized: float = 0.0) -> float:
    """Bytes of weights as they are stored: trained ones in fp32; of frozen ones `quantized` in NF4, others in bf16."""
    return trained * FP32_BYTES + (frozen - quantized) * BF16_BYTES + quantized * WEIGHT_BYTES


def weight_bytes(planned: PlannedStage, pp_rank: PlannedRank) -> float:
    """Bytes of a rank's shards of weights, wherever they are."""
    stored = stored_bytes(pp_rank.trained, pp_rank.frozen, pp_rank.layers * planned.quantized_block)
    return stored / planned.degrees.fsdp


def optimizer_shares(planned: PlannedStage, pp_rank: PlannedRank) -> list[tuple[OptimizerKind, float]]:
    """The optimizers of a rank, and how many numbers of its shard each updates."""
    kind, shard = OPTIMIZERS[planned.config.optimizer.name], pp_rank.trained / planned.degrees.fsdp
    own = pp_rank.layers * planned.counts.matrices / planned.degrees.fsdp if kind.blocks_only else shard
    return [(kind, own), (ADAMW, shard - own)]


def state_bytes(planned: PlannedStage, pp_rank: PlannedRank) -> float:
    """Bytes of a rank's optimizer state, wherever it is."""
    return sum(count * kind.state_bytes(planned.config.optimizer) for kind, count in optimizer_shares(planned, pp_rank))


def _gathered_weights(planned: PlannedStage, pp_rank: PlannedRank) -> float:
    """Bytes of gathered weights: the outer ones, and those of the running layers, or of all layers in a pipeline."""
    parallel, c = planned.config.parallel, planned.element_bytes
    # The backward of a pipeline leaves all weights gathered, whatever its forward does.
    freed = parallel.fsdp_reshard != "never" and parallel.pp == 1
    # One layer runs, and the next one is gathered ahead, but experts that are wrapped apart are not gathered ahead.
    blocks = min(pp_rank.layers, 2) if freed else pp_rank.layers
    ahead = (blocks - 1) * planned.gathered_experts if freed else 0.0
    return blocks * planned.gathered_block_bytes + (pp_rank.outer_parameters - ahead) * c


def _dequantized_bytes(planned: PlannedStage) -> float:
    """Bytes of the weight in NF4 that multiplies, in the compute dtype, and of what its values are looked up with."""
    largest = planned.trained.largest_quantized if planned.trained else 0
    return largest * planned.element_bytes + min(largest, GROUPS_AT_ONCE * GROUP) * LOOKUP_BYTES


def _held_in_pipeline(planned: PlannedStage, pp_rank: PlannedRank) -> list[tuple[float, float]]:
    """(layers whose activations are held, bytes of whole gradients) at the moments that may be the peak.

    A pipeline reduces gradients once a step; until then they add up whole. If all forwards of a step come before the
    first backward, there are no gradients yet while most activations are held.
    """
    if planned.degrees.pp == 1:
        return [(pp_rank.kept_layers, 0.0)]
    of_others = pp_rank.layers * (planned.gathered_block - planned.counts.block)  # experts of other ranks
    whole = (pp_rank.trained + (0.0 if planned.trained else of_others)) * planned.reduce_bytes
    if pp_rank.kept_layers < pp_rank.layers * planned.stage.micro_batches:
        return [(pp_rank.kept_layers, whole)]
    return [(pp_rank.kept_layers, 0.0), (pp_rank.kept_layers - pp_rank.layers / pp_rank.pipeline_stages, whole)]


def _loss_phases(planned: PlannedStage, pp_rank: PlannedRank, weights: float) -> list[Phase]:
    """The loss forward, with the logits of a chunk, and backward, with two gradients of the output matrix."""
    if not pp_rank.is_last:
        return []
    args, tp, c = planned.args, planned.degrees.tp, planned.element_bytes
    rows = -(-args.vocab_size // tp)
    copies = 0 if c == FP32_BYTES else c
    matrix, hidden = rows * args.dim * planned.trains_output, planned.tokens * args.dim
    chunk_tokens = planned.config.training.loss_chunk_tokens
    assert chunk_tokens, "resolve_run decides it"
    chunk = min(chunk_tokens, planned.tokens) * rows
    norm = hidden / tp * (c if planned.fused_norm else 2 * FP32_BYTES)
    # The products, and logits and probabilities in fp32; if compiled, the products and their gradient.
    of_chunk = 2 * c if planned.config.compile.enable and tp == 1 else c + FP32_BYTES * (2 if copies else 1)
    forward = chunk * of_chunk + matrix * FP32_BYTES + 2 * hidden * c + norm
    backward = matrix * (FP32_BYTES + c) + hidden * (c + (2 * FP32_BYTES if copies else c)) + norm
    return [
        ("logits of a chunk", {"loss": forward, "communication": weights}),
        ("backward of the loss", {"loss": backward, "communication": weights}),
    ]


def _between_pipeline_stages(planned: PlannedStage, pp_rank: PlannedRank, block: BlockBytes) -> float:
    """Bytes of the hidden states that pipeline stages exchange.

    torch makes a buffer for what each pipeline stage receives in each micro-batch of a step: hidden states, but in the
    first, and their gradients, but in the last. Outputs that were sent wait for their backward too, while the inputs
    that were received, which `kept_bytes` counts, are in those buffers.
    """
    if planned.degrees.pp == 1:
        return 0.0
    received = 2 * pp_rank.pipeline_stages - pp_rank.is_first - pp_rank.is_last
    waiting = pp_rank.kept_layers / pp_rank.layers * (pp_rank.is_first - pp_rank.is_last)
    return block.stream * (planned.stage.micro_batches * received + waiting)


def _block_phases(
    planned: PlannedStage, pp_rank: PlannedRank, block: BlockBytes, kept: tuple[float, float, float], weights: float
) -> list[Phase]:
    """The backward of a layer: its MLP, its attention and what else may be the peak. What it kept is counted apart.

    Args:
        kept: result of `kept_bytes`.
        weights: result of `_gathered_weights`.
    """
    args, c, tp, activation = planned.args, planned.element_bytes, planned.degrees.tp, planned.config.activation
    mode, tiles = activation.checkpoint, activation.mlp_tiles
    output = -(-args.vocab_size // tp) * args.dim * c if pp_rank.is_last and planned.trains_output else 0
    # A block's whole gradients, and those of the previous one in transit, which on one rank are its shards already; for
    # experts that are wrapped apart only one of the two. In a pipeline they add up until the step's end.
    one_rank = planned.degrees.fsdp * planned.degrees.dp_replicate == 1
    stay = one_rank and planned.reduce_bytes == FP32_BYTES and not planned.config.parallel.fsdp_cpu_offload
    reduced = planned.reduced_block * (c + (0 if stay else planned.reduce_bytes)) + output
    if not planned.trained:
        reduced -= planned.gathered_experts * min(c, planned.reduce_bytes)
    traffic = weights + (0 if planned.config.parallel.pp > 1 else reduced)
    recomputed = 0.0 if mode == "none" else 1.0
    halves = recomputed * planned.compiled.halves  # recomputed each by itself, from what passed between them
    gradient = block.stream  # of the layer's output, which is as large as its input
    # With offload, the last tensor that the layer before kept is fetched ahead: in `selective` its MLP's product, in
    # `attention_saved` the small log-sum-exp.
    ahead = activation.offload * block.stream * {"selective": tp, "attention_saved": halves}.get(mode, 1)
    again = block.qkv + block.normed_qk + (block.out + block.all_to_all if mode == "full" else 0.0)
    first_norm = block.first_norm
    if mode == "selective":  # by now the recomputation has used up the products of the attention that were kept
        again, first_norm = again - block.unrotated_qkv, first_norm - block.stream * tp * (1 - halves)
    # The backward of SwiGLU's product needs three of the MLP's tensors and their three gradients. Experts have these
    # gradients one after another, and beside their rows the gradient of those that came back.
    ffn = (block.ffn + 3 / 2 * block.copies if block.copies else 1.5 * block.ffn) / tiles
    if planned.config.training.float8 != "none" and not planned.compiled.mlp and not block.copies:
        # The cast of the product's gradient and of its input to 8 bits goes through two copies in fp32.
        ffn = max(ffn, block.ffn * (1 + (c + 2 * FP32_BYTES + 1) / c / 4) / tiles)
    # Or a product runs, whose weight is dequantized, when one of the six is freed or not there yet.
    dequantized = _dequantized_bytes(planned)
    ffn = max(ffn, ffn * 5 / 6 + dequantized)
    if tiles == 1:  # rows arrive while those that were sent still exist
        ffn += recomputed * planned.sent_to_experts
    held_ffn = {"none": kept[2], "selective": block.ffn / 2 + block.copies / 2}.get(mode, 0.0)
    second = _second_norm_kept(block, tiles)
    if halves and (planned.fused_norm or c == FP32_BYTES or tiles > 1):
        second -= block.stream  # the norm's input is among what the layer kept
    # Each tile runs the second norm again, and the gradients of the tiles' inputs add up beside the output's gradient.
    at_work = gradient if tiles == 1 else 2 * gradient + (block.second_norm - block.stream) / tiles
    in_mlp = {
        "block_inputs": recomputed * ((1 - halves) * first_norm + second + block.more_norms / 2) + at_work + ahead,
        "attention": recomputed * (1 - halves) * again,
        "mlp": ffn - (held_ffn if tiles == 1 else 0.0),
        "communication": traffic,
    }
    # By now the layer's own MLP and second norm are freed.
    group = (planned.stage.cp, planned.all_to_all_ranks(planned.strategy))
    costs = STRATEGY_COSTS[planned.strategy] if planned.stage.cp > 1 else RING
    working = costs.working_bytes(planned.tokens, *group, planned.heads) + _repeated_keys_bytes(planned)
    working = max(working, dequantized)
    in_attention = {
        "block_inputs": recomputed * first_norm + gradient + ahead - (1 - recomputed) * second - halves * block.stream,
        "attention": recomputed * again + working + block.out,
        "mlp": -kept[2],
        "communication": traffic,
    }
    if activation.offload and not recomputed:  # each operation fetches what it kept, and the others' is on the host
        in_mlp = in_mlp | {"block_inputs": at_work + ahead - kept[0], "attention": -kept[1]}
        in_attention = in_attention | {"block_inputs": gradient + ahead - kept[0]}
    phases = [("MLP", in_mlp), ("attention", in_attention)]
    phases += [(name, in_attention | {"attention": at_work}) for name, at_work in recurrence_phases(planned)]
    if tp > 1 and recomputed > halves:
        # The attention's output product is summed over tp: whole partial products, in two orders, and their sum.
        in_sum = {
            "block_inputs": first_norm + 2 * gradient + ahead,
            "attention": in_mlp["attention"],
            "communication": traffic + 2 * (block.stream * tp + gradient),
        }
        phases.append(("sum over tp of the attention", in_sum))
    return phases
