"""Bytes of a rank at the peak of a step, by kind. Formulas and reasons: docs/memory.md, docs/planner.md."""

from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan_cp.attention.linear.kernel import CHUNK, PART
from torchtitan_cp.planner.stage import PlannedRank, PlannedStage
from torchtitan_cp.planner.strategy_costs import FP32_BYTES, RING, STRATEGY_COSTS

QUANTIZED_MOMENTS = 2 * (1 + 4 / 256)  # two moments of a byte, with an fp32 scale for each 256 values
KINDS = ("weights", "gradients", "optimizer", "block_inputs", "attention", "mlp", "loss", "communication")


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by kind, and the phase of a step in which they are most."""

    phase: str
    by_kind: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one layer's tensors on a rank for one micro-batch; the mean, where some have a recurrent state.

    Attributes:
        stream: its input, cut along the sequence by tp.
        first_norm, second_norm: what a norm keeps, with its gathered output; the first's input is the stream.
        qkv: rotated q, k and v, none where an all-to-all keeps its own; given: what their products give, before that.
        out: attention and log-sum-exp.
        all_to_all: what an all-to-all keeps.
        ffn: the MLP's four tensors of ffn_dim.
        copies: rows that are sent to experts, and what comes back.
    """

    stream: float
    first_norm: float
    second_norm: float
    qkv: float
    given: float
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
    # A norm keeps its input, or where it is not fused two fp32 copies (in fp32 one is the input); its output is whole.
    second = (stream if planned.fused_norm else 2 * FP32_BYTES * e / tp) + e * c
    first = second - stream if planned.fused_norm or c == FP32_BYTES else second
    traded = planned.all_to_all_ranks(planned.strategy)
    own, kept_by_all_to_all = heads.after_all_to_all(traded), tokens * traded if traded > 1 else 0.0
    qkv = given = tokens * (query + 2 * key) * c if traded == 1 else 0.0
    out = tokens * (query * c + heads.query * FP32_BYTES)
    trade = kept_by_all_to_all * (2 * (own.query + own.key) * own.dim * c + own.query * FP32_BYTES)
    if share := sum(map(bool, args.state_sizes)) / args.n_layers:
        # A gated delta net keeps q, k and v before and after their convolution, and its gate, once more in fp32 and
        # behind the SiLU, beside the norm and the product of its output.
        channels, values = args.state_widths
        kept = tokens * (2 * channels * c + 3 * values * c + 2 * values * FP32_BYTES)
        given = qkv * (1 - share) + tokens * (channels + values) * c * share
        qkv, out = qkv * (1 - share) + kept * share, out * (1 - share) + tokens * values * c * share
        trade *= 1 - share
    return BlockBytes(
        stream=tokens * stream,
        first_norm=tokens * first,
        second_norm=tokens * second,
        qkv=qkv,
        given=given,
        out=out,
        all_to_all=trade,
        ffn=tokens * 4 * args.active_ffn_dim / tp * c,
        copies=tokens * 2 * args.experts_per_token * e * c / tp,
    )


def _delta_rule_bytes(planned: PlannedStage) -> float:
    """Bytes at work in the backward of a gated delta rule, in fp32: of each head and token the factors of its chunk and
    their gradients, rows as long as a key or a chunk, and the chunk's states; and the gradients of all inputs. A key
    head of very many tokens is more than a part and not counted as such."""
    if not (state := max(planned.args.state_sizes)):
        return 0.0
    values = planned.args.state_widths[1]
    dim = state / values
    rows = planned.tokens * values / dim
    return FP32_BYTES * (3 * dim * rows + min(rows, PART / dim) * (12 * dim + 8 * CHUNK + 2 * dim * dim / CHUNK))


def kept_bytes(planned: PlannedStage, block: BlockBytes) -> tuple[float, float, float]:
    """Bytes a layer keeps for its backward, on the device or offloaded: (block inputs, attention, MLP)."""
    mode, tiles = planned.config.activation.checkpoint, planned.config.activation.mlp_tiles
    attention = block.out + block.all_to_all
    if mode == "full":
        return block.stream, 0.0, 0.0
    if mode == "attention_saved":
        return block.stream, attention, 0.0
    if mode == "selective":
        # Products give q, k, v before their rotation; wo and w2 the width; w1 and w3 two of the MLP's tensors.
        width = block.stream * planned.degrees.tp
        # Rows that come back from experts are joined by a product.
        joined = width if planned.sent_to_experts else 0.0
        ffn = 0.0 if tiles > 1 else block.ffn / 2 + (block.copies / 2 or width) + joined
        return block.stream + width, attention + block.given, ffn
    inputs = block.stream + block.first_norm + _second_norm_kept(block, tiles)
    return inputs, attention + block.qkv, 0.0 if tiles > 1 else block.ffn + block.copies


def _second_norm_kept(block: BlockBytes, tiles: int) -> float:
    """What a layer that is not recomputed keeps of its second norm: in tiles its input, and what is outside of them."""
    # Experts' balance passes the norm once more, beside the same input.
    again = block.second_norm - block.stream if block.copies else 0.0
    return again + (block.second_norm if tiles == 1 else block.stream)


Phase = tuple[str, float, dict[str, float]]
"""What a phase is called, the share of activations freed by then, and what it adds, by kind."""


def rank_memory(planned: PlannedStage, own: PlannedRank) -> Iterator[Memory]:
    """Each phase of a step on a pipeline rank."""
    always, parked = _always(planned, own)
    weights = _gathered_weights(planned, own)
    block = block_bytes(planned)
    kept = (0.0, 0.0, 0.0) if planned.config.activation.offload else kept_bytes(planned, block)
    # The outer parameters' gradients, whole and on their way to their shards.
    reduced = own.outer_parameters * (planned.element_bytes + planned.reduce_bytes)
    pipelined = planned.degrees.pp > 1
    phases: list[Phase] = [
        *_loss_phases(planned, own, weights),
        *_block_phases(planned, own, block, kept[2], weights),
        ("reduction of the last gradients", 1.0, {"communication": reduced + (weights if pipelined else 0.0)}),
        ("update, with some of the state back from the host", 1.0, {"optimizer": parked}),
    ]
    waiting = _waiting_losses(planned, own)
    for phase, gone, extra in phases:
        left = own.kept_layers * (1 - gone)
        held = {kind: left * size for kind, size in zip(("block_inputs", "attention", "mlp"), kept, strict=True)}
        # Where gradients are reduced once, a shard's exists once its layer has run backward for the last time.
        shards = gone if planned.stage.micro_batches == 1 or pipelined else 1.0
        now = always | {"gradients": always["gradients"] * shards, "loss": waiting * ("optimizer" not in extra)}
        yield Memory(phase, {kind: sum(part.get(kind, 0.0) for part in (now, held, extra)) for kind in KINDS})


def _always(planned: PlannedStage, own: PlannedRank) -> tuple[dict[str, float], float]:
    """Shards of weights, gradients and optimizer state; and the state that an update brings from the host at a time."""
    config, fsdp = planned.config, planned.degrees.fsdp
    if config.parallel.fsdp_cpu_offload:
        return {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}, 0.0
    shard = own.parameters / fsdp
    moments = QUANTIZED_MOMENTS if config.optimizer.state == "8bit" else 2 * FP32_BYTES
    # Muon has a momentum alone.
    by_muon = own.layers * planned.counts.muon / fsdp if config.optimizer.name == "muon" else 0.0
    state = (shard - by_muon) * moments + by_muon * FP32_BYTES
    always = {"weights": shard * FP32_BYTES, "gradients": shard * FP32_BYTES, "optimizer": state}
    if not config.optimizer.offload_state:
        return always, 0.0
    # One parameter at work, the next on its way there and the one before on its way back: the outer matrix is largest.
    largest = planned.args.vocab_size * planned.args.dim / planned.degrees.tp / fsdp * moments
    return always | {"optimizer": 0.0}, min(state, 3 * largest)


def _gathered_weights(planned: PlannedStage, own: PlannedRank) -> float:
    """Gathered weights: outer ones for the whole step, and of the layers those at work, or all in a pipeline."""
    parallel, block = planned.config.parallel, planned.gathered_block
    # A pipeline's backward leaves all of them gathered, whatever a forward does.
    again = parallel.fsdp_reshard != "never" and parallel.pp == 1
    # At work: one, and those gathered ahead; experts wrapped apart are gathered only while their layer runs.
    blocks = min(own.layers, 1 + parallel.fsdp_prefetch) if again else own.layers
    ahead = (blocks - 1) * planned.gathered_experts if again else 0.0
    gathered = (blocks * block - ahead + own.outer_parameters) * planned.element_bytes
    # A pipeline reduces once a step: until then whole gradients add up.
    whole = own.parameters + own.layers * (block - planned.counts.block)
    return gathered + (whole * planned.reduce_bytes if parallel.pp > 1 else 0)


def _loss_phases(planned: PlannedStage, own: PlannedRank, weights: float) -> list[Phase]:
    """Logits of a chunk forward; the output's fp32 gradient and its scaled one backward."""
    if not own.is_last:
        return []
    args, tp, c = planned.args, planned.degrees.tp, planned.element_bytes
    rows = -(-args.vocab_size // tp)
    copies = 0 if c == FP32_BYTES else c
    matrix, hidden = rows * args.dim, planned.tokens * args.dim
    chunk = min(planned.config.training.loss_chunk_tokens, planned.tokens) * rows
    norm = hidden / tp * (c if planned.fused_norm else 2 * FP32_BYTES)
    # Products, and logits and probabilities in fp32; compiled, the products and their gradient.
    of_chunk = 2 * c if planned.config.compile.enable and tp == 1 else c + FP32_BYTES * (2 if copies else 1)
    forward = chunk * of_chunk + matrix * FP32_BYTES + 2 * hidden * c + norm
    backward = matrix * (FP32_BYTES + c) + hidden * (c + (2 * FP32_BYTES if copies else c)) + norm
    return [
        ("logits of a chunk", 0.0, {"loss": forward, "communication": weights}),
        ("backward of the loss", 0.0, {"loss": backward, "communication": weights}),
    ]


def _waiting_losses(planned: PlannedStage, own: PlannedRank) -> float:
    """Gradients that the losses of other micro-batches have made by a backward: gpipe runs all forwards first."""
    if not (own.is_last and planned.degrees.pp > 1 and planned.config.parallel.pp_schedule == "gpipe"):
        return 0.0
    matrix = -(-planned.args.vocab_size // planned.degrees.tp) * planned.args.dim
    one = matrix * FP32_BYTES + planned.tokens * planned.args.dim * planned.element_bytes
    return (planned.stage.micro_batches - 1) * one


def _block_phases(
    planned: PlannedStage, own: PlannedRank, block: BlockBytes, kept_mlp: float, weights: float
) -> list[Phase]:
    """The first and the last layer to run backward, each in its MLP and in its attention."""
    args, c, tp, activation = planned.args, planned.element_bytes, planned.degrees.tp, planned.config.activation
    mode, tiles = activation.checkpoint, activation.mlp_tiles
    output = -(-args.vocab_size // tp) * args.dim * c if own.is_last else 0
    # A block's gradients whole, and those of the one before on their way; a pipeline's add up in `weights`. Of experts
    # apart from the rest, one of the two.
    reduced = planned.gathered_block * (c + planned.reduce_bytes) + output
    reduced -= planned.gathered_experts * min(c, planned.reduce_bytes)
    traffic = weights + (0 if planned.config.parallel.pp > 1 else reduced)
    recomputed = 0.0 if mode == "none" else 1.0
    gradient = block.stream  # of the layer's output, which is as large as its input
    # With offload two layers' shares are on the device at a time.
    attention = 0.0 if mode == "full" else block.out + block.all_to_all
    of_layer = sum(kept_bytes(planned, block)) if mode == "selective" else block.stream + attention
    parked = 2 * of_layer if activation.offload else 0.0
    again = block.qkv + (block.out + block.all_to_all if mode == "full" else 0.0)
    # Backward of SwiGLU's product: three of the MLP's tensors are still needed, beside their three gradients. Experts
    # have theirs one after another, and the gradients of their rows all at once.
    ffn = (block.ffn + 2 * block.copies if block.copies else 1.5 * block.ffn) / tiles
    if tiles == 1:  # what arrives while what was sent is still there
        ffn += recomputed * planned.sent_to_experts
    held_ffn = {"none": block.ffn + block.copies, "selective": (block.ffn + block.copies) / 2}.get(mode, 0.0)
    second = _second_norm_kept(block, tiles)
    # In tiles the second norm is run again with each, and the gradients of their inputs add up beside the output's.
    at_work = gradient if tiles == 1 else 2 * gradient + (block.second_norm - block.stream) / tiles
    in_mlp = {
        "block_inputs": recomputed * (block.first_norm + second) + at_work + parked,
        "attention": recomputed * (again - (block.given if mode == "selective" else 0.0)),
        "mlp": ffn - (held_ffn if tiles == 1 else 0.0),
        "communication": traffic,
    }
    # By then the layer's own MLP and second norm are gone; the gradient of its output stands beside the exchange.
    group = (planned.stage.cp, planned.all_to_all_ranks(planned.strategy))
    costs = STRATEGY_COSTS[planned.strategy] if planned.stage.cp > 1 else RING
    working = costs.working_bytes(planned.tokens, *group, planned.heads)
    in_attention = {
        "block_inputs": recomputed * block.first_norm + gradient + parked - (1 - recomputed) * second,
        "attention": recomputed * again + working + block.out,
        "mlp": -kept_mlp,
        "communication": traffic,
    }
    layer = [("MLP", in_mlp), ("attention", in_attention)]
    if working := _delta_rule_bytes(planned):
        layer.append(("gated delta rule", in_attention | {"attention": recomputed * again + working}))
    phases: list[Phase] = [(f"{part} of the first layer backward", 0.0, extra) for part, extra in layer]
    if tp > 1 and recomputed:
        # The ranks' parts of the attention's product whole, in the order in which they are summed, and their sum.
        whole = block.stream * tp
        in_sum = {
            "block_inputs": block.first_norm + 2 * gradient + parked,
            "attention": in_mlp["attention"],
            "communication": traffic + 2 * (whole + gradient),
        }
        phases.append(("sum of the first layer's attention over tp", 0.0, in_sum))
    if own.kept_layers == own.layers:
        # One micro-batch at a time: when the last layer runs backward, the others' activations are gone.
        gone = 1 - 1 / own.layers
        phases += [(f"{part} of the last layer backward", gone, extra) for part, extra in layer]
    return phases
