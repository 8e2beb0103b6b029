"""What a step computes, and how it is spread over ranks: [training], [lora], [optimizer], [parallel] and others.

Sections of the TOML file, as in sections.py.
"""

import math
from dataclasses import dataclass

from torchtitan_cp.config import names
from torchtitan_cp.config.key import key


@dataclass(frozen=True)
class Training:
    """How one optimizer step is computed.

    Attributes:
        seed: seed of weights and data order
        compute_dtype: dtype of forward and backward; weights are fp32, and reduce_dtype is
            that of gradients in transit
        float8: CUDA from compute capability 8.9: the blocks' linear layers multiply in 8 bits (extra float8), with
            a scale for each tensor or row
        deterministic: only kernels that give the same bits every time; slower on CUDA
        micro_batch_sequences: sequences a data-parallel rank runs at once
        reduce_dtype: dtype in which gradients are summed over ranks
        max_grad_norm: gradients are clipped to this global norm; 0: never
        loss_chunk_tokens: tokens whose logits exist at the same time; default: 4096 compiled on CUDA, else 1024
        z_loss: weight of logsumexp(logits)^2 in the loss of each token, e.g. 1e-4
        router_bias_update: by how much a step raises the bias of experts with fewer tokens than the mean, and lowers
            that of the others, e.g. 1e-3, in models whose routers have such biases; 0: not at all
        loss_normalization: what a step's loss is the mean of; token: of the tokens that are learned; conversation: of
            conversations, each the mean of its learned tokens; batch_tokens: of all tokens, 0 where none is learned
    """

    seed: int = key(0, least=0)
    compute_dtype: str = key("bfloat16", choices=("float32", "bfloat16"))
    float8: str = key("none", choices=("none", "tensorwise", "rowwise"))
    deterministic: bool = False
    micro_batch_sequences: int = key(1, least=1)
    reduce_dtype: str = key("float32", choices=("float32", "bfloat16"))
    max_grad_norm: float = key(1.0, least=0)
    loss_chunk_tokens: int | None = key(None, least=1)
    z_loss: float = key(0.0, least=0)
    router_bias_update: float = key(0.0, least=0)
    loss_normalization: str = key("token", choices=("token", "conversation", "batch_tokens"))


@dataclass(frozen=True)
class Lora:
    """Train adapters of low rank beside frozen weights; without this section all weights are trained.

    Attributes:
        rank: rows of an adapter's matrix A, and columns of its B; both are fp32
        alpha: what an adapter adds is scaled by alpha / rank
        rslora: scale by alpha / sqrt(rank) instead
        targets: regular expressions found anywhere in the names of linear layers of the blocks; empty: all layers but
            routers
        train: regular expressions found anywhere in the names of modules whose own weights are trained whole, e.g.
            ["norm", "tok_embeddings"]
        base: how frozen weights are stored; nf4 (extra float8, without tp): those of the blocks' linear layers in 4.13
            bits a weight, quantized when they are loaded, the others in bf16
        dropout: only 0: recomputation and the ranks of a sequence would each have to draw the same numbers
    """

    rank: int = key(16, least=1)
    alpha: float = key(32.0, least=0)
    rslora: bool = False
    targets: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    base: str = key("bfloat16", choices=("bfloat16", "nf4"))
    dropout: float = key(0.0, least=0, below=1)

    @property
    def scale(self) -> float:
        """Factor of what an adapter adds. Sources: Hu et al., 2021; with rslora, Kalajdzievski, 2023."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with their own learning rate or weight decay.

    Attributes:
        match: regular expression found anywhere in a parameter's name
        lr_scale: factor on the learning rate
        weight_decay: weight decay; default: optimizer.weight_decay for matrices, else none
    """

    match: str = ""
    lr_scale: float = key(1.0, least=0)
    weight_decay: float | None = key(None, least=0)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer.

    Attributes:
        name: muon orthogonalises the steps of the blocks' matrices, each expert's by itself; all else is AdamW's
        lr: peak learning rate
        beta1: decay of the first moment
        beta2: decay of the second moment
        eps: added to the root of the second moment
        weight_decay: decoupled weight decay of matrices (norms and biases have none)
        state: AdamW's moments; 8bit (extra float8) resumes on other ranks if tp is the same and shards are whole
            blocks of 256 values
        offload_state: CUDA: keep the state in host memory; an update fetches that of one parameter at a time
        groups: [[optimizer.groups]] tables of match (a regex), lr_scale and weight_decay; the first match
            applies
    """

    name: str = key("adamw", choices=names.OPTIMIZERS)
    lr: float = key(3e-4, least=0, most=100)
    beta1: float = key(0.9, least=0, below=1)
    beta2: float = key(0.95, least=0, below=1)
    eps: float = key(1e-8, least=1e-30, most=1)
    weight_decay: float = key(0.1, least=0)
    state: str = key("float32", choices=("float32", "8bit"))
    offload_state: bool = False
    groups: tuple[ParameterGroup, ...] = ()


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate over the whole run, except stages with their own `lr`.

    Attributes:
        shape: curve after warm-up
        warmup_steps: steps of linear warm-up from zero
        decay_fraction: wsd: fraction of the steps after warm-up that decay
        end_fraction: last learning rate as a fraction of the peak
    """

    shape: str = key("cosine", choices=names.LR_SHAPES)
    warmup_steps: int = key(0, least=0)
    decay_fraction: float = key(0.2, least=0, most=1)
    end_fraction: float = key(0.1, least=0, most=1)


@dataclass(frozen=True)
class Parallel:
    """Degrees of the mesh; their product is the number of ranks. -1 takes what is left (one key at most).

    Attributes:
        pp: pipeline ranks
        pp_schedule: order of forwards and backwards in the pipeline
        pp_stages_per_rank: pipeline stages on one rank; 0: as few as the schedule allows
        dp_replicate: replicas of the sharded model (HSDP)
        dp_shard: data-parallel ranks that shard the parameters
        cp: context-parallel ranks; a stage may set its own
        tp: tensor-parallel ranks, best in one node
        ep: expert-parallel ranks, a divisor of dp_shard x cp; each has its share of the experts of every layer
        async_tp: CUDA, compiled blocks: tensor-parallel communication overlaps the matrix products in parts
        fsdp_reshard: whether a block's gathered weights are freed after each forward and backward; never: after a
            step's last backward; auto: never in a pipeline, else always
        fsdp_cpu_offload: keep weights, gradients and optimizer state in host memory (CUDA)
    """

    pp: int = key(1, least=-1, excluded=0)
    pp_schedule: str = key("1f1b", choices=tuple(names.SCHEDULES))
    pp_stages_per_rank: int = key(0, least=0)
    dp_replicate: int = key(1, least=-1, excluded=0)
    dp_shard: int = key(-1, least=-1, excluded=0)
    cp: int = key(1, least=-1, excluded=0)
    tp: int = key(1, least=-1, excluded=0)
    ep: int = key(1, least=1)
    async_tp: bool = False
    fsdp_reshard: str = key("auto", choices=("auto", "always", "never"))
    fsdp_cpu_offload: bool = False


@dataclass(frozen=True)
class ContextParallel:
    """How attention crosses ranks.

    Attributes:
        strategy: exchange between ranks; a stage may set its own
        all_to_all_ranks: hybrid: neighbouring ranks that exchange heads inside the ring
        kernel: attention kernel on one rank
        layout: which rows of the sequence a rank holds
        kv_transfer: float8 carries keys and values in 8 bits (ring, all_gather, and the ring of hybrid)
    """

    strategy: str = key("auto", choices=names.STRATEGIES)
    all_to_all_ranks: int = key(2, least=1)
    kernel: str = key("auto", choices=names.KERNELS)
    layout: str = key("auto", choices=names.LAYOUTS)
    kv_transfer: str = key("exact", choices=names.TRANSFERS)


@dataclass(frozen=True)
class StageActivation:
    """What a stage keeps between forward and backward; default for each key: the value in [activation].

    Attributes:
        checkpoint: what is recomputed
        offload: CUDA: keep it in pinned host memory
        mlp_tiles: pieces of the sequence that a block's MLP processes one after the other
    """

    checkpoint: str | None = key(None, choices=names.ACTIVATIONS)
    offload: bool | None = None
    mlp_tiles: int | None = key(None, least=1)


@dataclass(frozen=True)
class Activation(StageActivation):
    """What is kept between forward and backward.

    Attributes:
        checkpoint: none keeps all; full each block's input; attention_saved also the attention's output; selective
            also matrix products; the rest is recomputed
        offload: CUDA: keep it in pinned host memory, copied out and back during computation
        mlp_tiles: pieces of the sequence that a block's MLP processes one after the other
    """

    checkpoint: str = key("none", choices=names.ACTIVATIONS)
    offload: bool = False
    mlp_tiles: int = key(1, least=1)


@dataclass(frozen=True)
class Compile:
    """torch.compile of the blocks and the loss.

    Attributes:
        enable: compile each block (of mixtures parts, see docs/experts.md), and without tensor parallelism the loss
            between its matrix products; default: on CUDA, where nothing in the run excludes it
    """

    enable: bool | None = None
