"""Bytes of a rank at the fullest moment of a step, by kind. Formulas and reasons: docs/memory.md, docs/planner.md."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torchtitan_cp.attention.strategies.all_gather import HEAD_GROUPS
from torchtitan_cp.config import Config
from torchtitan_cp.planner.exchange import WIDE, Heads, traded
from torchtitan_cp.planner.parameters import count_parameters

QUANTIZED_MOMENTS = 2 * (1 + 4 / 256)  # two moments of a byte, with an fp32 scale for each 256 values


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, and the moment at which they are most."""

    moment: str = ""
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    block_inputs: float = 0.0
    attention: float = 0.0
    mlp: float = 0.0
    loss: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, float]:
        """Kind -> bytes."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "moment"}


@dataclass(frozen=True)
class Part:
    """What of a model a pipeline rank has.

    Attributes:
        layers: how many; kept_layers: times the micro-batches whose activations are held at once.
        opens, closes: it has the embedding, the output.
    """

    layers: int
    kept_layers: float
    opens: bool = True
    closes: bool = True


@dataclass(frozen=True)
class Setting:
    """Everything that memory depends on besides the model.

    Attributes:
        tokens: of one micro-batch on a rank, B S/cp.
        micro_batches: of a step.
        tp, fsdp, cp: degrees.
        strategy: of attention; inner: ranks that trade heads.
        fused_norm: see devices.Accelerator.
    """

    config: Config
    tokens: int
    micro_batches: int
    tp: int
    fsdp: int
    cp: int
    strategy: str
    inner: int
    fused_norm: bool

    @property
    def element_bytes(self) -> int:
        return 2 if self.config.training.compute_dtype == "bfloat16" else 4

    @property
    def reduce_bytes(self) -> int:
        return 2 if self.config.training.reduce_dtype == "bfloat16" else 4


@dataclass(frozen=True)
class Block:
    """Bytes of one layer's tensors on a rank for one micro-batch.

    Attributes:
        stream: its input, cut along the sequence by tp.
        first_norm, second_norm: what a norm keeps, with its gathered output; the first's input is the stream.
        balance: what experts' balance keeps of a second pass of the second norm.
        qkv: rotated q, k and v, none where an all-to-all keeps its own; out: attention and log-sum-exp.
        traded: what an all-to-all keeps.
        wide: the MLP's four wide tensors.
        copies: rows that are dealt to experts, and what comes back.
    """

    stream: float
    first_norm: float
    second_norm: float
    balance: float
    qkv: float
    out: float
    traded: float
    wide: float
    copies: float


def block_of(shape: Any, setting: Setting) -> Block:
    """The sizes of a layer's tensors."""
    e, c, tp, tokens = shape.dim, setting.element_bytes, setting.tp, setting.tokens
    query, key = shape.n_heads * shape.head_dim / tp, shape.n_kv_heads * shape.head_dim / tp
    stream = e / tp * c
    # A norm keeps its input, or where it is not fused two fp32 copies (in fp32 one is the input); its output is whole.
    second = (stream if setting.fused_norm else 2 * WIDE * e / tp) + e * c
    first = second - stream if setting.fused_norm or c == WIDE else second
    # Experts' balance passes the norm once more, beside the same input.
    balance = second - stream if shape.token_copies else 0.0
    heads = Heads(shape.n_heads // tp, shape.n_kv_heads // tp, shape.head_dim)
    return Block(
        tokens * stream,
        tokens * first,
        tokens * second,
        tokens * balance,
        tokens * (query + 2 * key) * c if setting.inner == 1 else 0.0,
        tokens * (query * c + heads.query * WIDE),
        _kept_by_trade(heads, setting),
        tokens * 4 * shape.token_ffn_dim / tp * c,
        tokens * 2 * shape.token_copies * e * c,
    )


def _kept_by_trade(heads: Heads, setting: Setting) -> float:
    """q, k, v, out and log-sum-exp in the sharding in which an all-to-all computed them."""
    if setting.inner == 1:
        return 0.0
    own = traded(heads, setting.inner)
    rows = setting.tokens * setting.inner
    values = 2 * (own.query + own.key) * own.dim * setting.element_bytes
    return rows * (values + own.query * WIDE)


def kept(block: Block, shape: Any, setting: Setting) -> tuple[float, float, float]:
    """Bytes a layer keeps for its backward: (block inputs, attention, MLP)."""
    mode, tiles = setting.config.activation.checkpoint, setting.config.activation.mlp_tiles
    if setting.config.activation.offload:
        return 0.0, 0.0, 0.0
    attention = block.out + block.traded
    if mode == "full":
        return block.stream, 0.0, 0.0
    if mode == "attention_saved":
        return block.stream, attention, 0.0
    if mode == "selective":
        # Products give q, k, v before their rotation; wo and w2 the width; w1 and w3 two wide tensors.
        width = setting.tokens * shape.dim * setting.element_bytes
        wide = 0.0 if tiles > 1 else block.wide / 2 + (block.copies / 2 or width)
        return block.stream + width, attention + block.qkv, wide
    inputs = block.stream + block.first_norm + second_norm_kept(block, tiles)
    return inputs, attention + block.qkv, 0.0 if tiles > 1 else block.wide + block.copies


def second_norm_kept(block: Block, tiles: int) -> float:
    """What a layer that is not recomputed keeps of its second norm: in tiles its input, and what is outside of them."""
    return block.balance + (block.second_norm if tiles == 1 else block.stream)


def attention_at_work(shape: Any, setting: Setting) -> tuple[float, float]:
    """Bytes of one attention beside q, k, v, out and their gradients: (forward, backward)."""
    c, tokens = setting.element_bytes, setting.tokens
    heads = Heads(shape.n_heads // setting.tp, shape.n_kv_heads // setting.tp, shape.head_dim)
    q, kv = heads.query * heads.dim, heads.key * 2 * heads.dim
    sums = WIDE if c < WIDE else 0  # in which a kernel adds up dq, tile by tile
    if setting.cp == 1:
        return 0.0, tokens * ((q + kv) * c + q * sums)
    if setting.strategy == "all_gather":
        gathered = setting.cp * tokens * kv / min(HEAD_GROUPS, heads.key)
        return 2 * gathered * c, gathered * (2 * c + 2 * WIDE) + tokens * (q + kv) * c
    ring = setting.cp // setting.inner
    own = traded(heads, setting.inner) if setting.inner > 1 else heads
    rows = tokens * setting.inner
    q, kv = own.query * own.dim, own.key * 2 * own.dim
    message = 2 * rows * (q + kv) * c if setting.inner > 1 else 0.0
    if ring == 1:
        return message, message / 2 + rows * ((q + kv) * c + q * sums)
    forward = rows * (2 * kv * c + q * WIDE)
    backward = rows * (2 * kv * c + (q + 3 * kv) * WIDE)
    return max(message, forward), message / 2 + backward


def memory_of(shape: Any, part: Part, setting: Setting) -> Memory:
    """The fullest moment of a step on a pipeline rank.

    Args:
        shape: with `vocab_size` set.
    """
    counts = count_parameters(shape, setting.tp)
    ends = counts.ends(part.opens, part.closes, shape.tie_embeddings)
    own = part.layers * counts.block + ends
    always = _always(setting, own, part.layers * counts.muon)
    weights_at_hand = _weights_at_hand(setting, part, counts.block, ends)
    block = block_of(shape, setting)
    inputs, attention, mlp = kept(block, shape, setting)
    held = {
        "block_inputs": part.kept_layers * inputs,
        "attention": part.kept_layers * attention,
        "mlp": part.kept_layers * mlp,
    }
    moments = [
        *_loss_moments(shape, setting, part, weights_at_hand),
        *_block_moments(shape, setting, part, block, counts.block, weights_at_hand),
        _last_moment(setting, ends, weights_at_hand),
        ("update, with the state back from the host", 1.0, {"optimizer": always.pop("parked")}),
    ]
    fullest = Memory()
    for moment, gone, extra in moments:
        total = dict(always)
        for kind, value in held.items():
            total[kind] = total.get(kind, 0.0) + value * (1 - gone)
        # Without accumulation a shard's gradient exists once its layer has run backward.
        if setting.micro_batches == 1:
            total["gradients"] *= gone
        for kind, value in extra.items():
            total[kind] = total.get(kind, 0.0) + value
        found = Memory(moment, **total)
        fullest = max(fullest, found, key=lambda memory: memory.total)
    return fullest


def _always(setting: Setting, own: int, muon: int) -> dict[str, float]:
    """Shards of weights, gradients and optimizer state; `parked` is what of that is on the host between updates.

    Args:
        own: parameters before they are sharded; muon: those of them that Muon takes, where it is chosen.
    """
    config, shard = setting.config, own / setting.fsdp
    if config.parallel.fsdp_cpu_offload:
        return {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0, "parked": 0.0}
    moments = QUANTIZED_MOMENTS if config.optimizer.state == "8bit" else 2 * WIDE
    # Muon has a momentum alone.
    by_muon = muon / setting.fsdp if config.optimizer.name == "muon" else 0.0
    state = (shard - by_muon) * moments + by_muon * WIDE
    parked = state if config.optimizer.offload_state else 0.0
    return {"weights": shard * WIDE, "gradients": shard * WIDE, "optimizer": state - parked, "parked": parked}


def _weights_at_hand(setting: Setting, part: Part, block: int, ends: int) -> float:
    """Gathered weights: the ends' for the whole step, and of the layers those at work, or all in a pipeline."""
    parallel = setting.config.parallel
    # A pipeline's backward leaves all of them gathered, whatever a forward does.
    again = parallel.fsdp_reshard != "never" and parallel.pp == 1
    # At work: one, those gathered ahead, and the buffer a gather arrives in.
    blocks = min(part.layers, 2 + parallel.fsdp_prefetch) if again else part.layers + 1
    gathered = (blocks * block + ends) * setting.element_bytes
    # A pipeline reduces once a step: until then whole gradients add up.
    return gathered + ((part.layers * block + ends) * setting.reduce_bytes if parallel.pp > 1 else 0)


Moment = tuple[str, float, dict[str, float]]


def _loss_moments(shape: Any, setting: Setting, part: Part, weights: float) -> list[Moment]:
    """Logits of a chunk forward; the output's fp32 gradient and its scaled copy backward."""
    if not part.closes:
        return []
    c, rows = setting.element_bytes, -(-shape.vocab_size // setting.tp)
    copies = 0 if c == WIDE else c
    matrix, hidden = rows * shape.dim, setting.tokens * shape.dim
    chunk = min(setting.config.training.loss_chunk_tokens, setting.tokens) * rows
    norm = hidden / setting.tp * (c if setting.fused_norm else 2 * WIDE)
    forward = chunk * (WIDE + 2 * copies) + matrix * (WIDE + c) + 2 * hidden * c + norm
    backward = matrix * (2 * WIDE + copies) + hidden * (c + (2 * WIDE if copies else c)) + norm
    return [
        ("logits of a chunk", 0.0, {"loss": forward, "communication": weights}),
        ("backward of the loss", 0.0, {"loss": backward, "communication": weights}),
    ]


def _block_moments(
    shape: Any, setting: Setting, part: Part, block: Block, block_parameters: int, weights: float
) -> list[Moment]:
    """The first and the last layer to run backward, each in its MLP and in its attention."""
    c, tiles, tp = setting.element_bytes, setting.config.activation.mlp_tiles, setting.tp
    activation = setting.config.activation
    output = -(-shape.vocab_size // tp) * shape.dim * c if part.closes else 0
    # A block's gradients whole, and two reduce-scatters of them under way; a pipeline's add up in `weights`.
    reduced = block_parameters * (c + 2 * setting.reduce_bytes) + output
    traffic = weights + (0 if setting.config.parallel.pp > 1 else reduced)
    mode = activation.checkpoint
    recomputed = 0.0 if mode == "none" else 1.0
    gradient = setting.tokens * shape.dim / tp * c
    # With offload two layers' shares are on the device at a time.
    parked = 2 * (block.stream + (0 if mode == "full" else block.out + block.traded)) if activation.offload else 0.0
    again = block.qkv + (block.out + block.traded if mode == "full" else 0.0)
    # Backward of SwiGLU's product: three wide tensors are still needed, beside their three gradients. Experts have
    # theirs one after another, and the gradients of their rows all at once.
    wide = (block.wide + 2 * block.copies if block.copies else 1.5 * block.wide) / tiles
    held_wide = {"none": block.wide + block.copies, "selective": (block.wide + block.copies) / 2}.get(mode, 0.0)
    second = second_norm_kept(block, tiles)
    # In tiles the second norm is run again with each, and the gradients of their inputs add up beside the output's.
    at_work = gradient if tiles == 1 else 2 * gradient + (block.second_norm - block.stream) / tiles
    in_mlp = {
        "block_inputs": recomputed * (block.first_norm + second) + at_work + parked,
        "attention": recomputed * (again - (block.qkv if mode == "selective" else 0.0)),
        "mlp": wide - (held_wide if tiles == 1 else 0.0),
        "communication": traffic,
    }
    # By then the layer's own MLP and second norm are gone; the gradient of its output stands beside the exchange.
    in_attention = {
        "block_inputs": recomputed * block.first_norm + gradient + parked - (1 - recomputed) * second,
        "attention": recomputed * again + attention_at_work(shape, setting)[1] + block.out,
        "mlp": -kept(block, shape, setting)[2],
        "communication": traffic,
    }
    moments = [
        ("MLP of the first layer backward", 0.0, in_mlp),
        ("attention of the first layer backward", 0.0, in_attention),
    ]
    if tp > 1 and recomputed:
        # The ranks' parts of the attention's product whole, in the order in which they are summed, and their sum.
        whole = setting.tokens * shape.dim * c
        in_sum = {
            "block_inputs": block.first_norm + 2 * gradient + parked,
            "attention": in_mlp["attention"],
            "communication": traffic + 2 * (whole + gradient),
        }
        moments.append(("sum of the first layer's attention over tp", 0.0, in_sum))
    if part.kept_layers == part.layers:
        # One micro-batch at a time: when the last layer runs backward, the others' activations are gone.
        gone = 1 - 1 / part.layers
        moments += [
            ("MLP of the last layer backward", gone, in_mlp),
            ("attention of the last layer backward", gone, in_attention),
        ]
    return moments


def _last_moment(setting: Setting, ends: int, weights: float) -> Moment:
    """The ends' gradients, whole and on their way to their shards."""
    return (
        "reduction of the last gradients",
        1.0,
        {"communication": weights + ends * (setting.element_bytes + setting.reduce_bytes)},
    )
