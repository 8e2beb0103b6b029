"""The sections of the TOML file as frozen dataclasses: every key with its type, default and meaning.

What each `Attributes:` says of a key is its help text: `--help` and `docs/config.md` are made from it. Those of the
text (`data`) and of RoPE (`rope`) have files of their own, and are found here too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchtitan_cp.config import names
from torchtitan_cp.config.data import Data, DataSource, ResolvedStageData, SourceKeys, StageData  # noqa: F401
from torchtitan_cp.config.key import key
from torchtitan_cp.config.rope import Rope

MAX_SECONDS = 1e8  # three years; torch counts in nanoseconds
MIN_PIECES = 300  # smallest trained vocabulary: it contains the 256 bytes


@dataclass(frozen=True)
class Job:
    """What the run is called and where its files go.

    Attributes:
        dump_folder: folder of this run: config.toml, metrics.jsonl, evaluation.jsonl, a trained tokenizer,
            tensorboard/, checkpoints/, and what docs/getting_started.md lists
        description: one line about the run, shown at start
        timeout_seconds: a step, validation or final save that takes longer ends the job
        startup_timeout_seconds: the limit for joining, building, loading, and each stage's first step and evaluation
        max_restarts: times that run_train.sh starts the ranks again after one died or hung
        log_level: of rank 0; debug also says why other attention kernels were passed over
    """

    dump_folder: str = "outputs/run"
    description: str = ""
    timeout_seconds: float = key(300.0, least=1, most=MAX_SECONDS)
    startup_timeout_seconds: float = key(1800.0, least=1, most=MAX_SECONDS)
    max_restarts: int = key(3, least=0)
    log_level: str = key("info", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class Model:
    """Which model is trained.

    Attributes:
        architecture: architecture by name, from models/
        flavor: sizes by name: debug, 1B, 3B, 8B, 70B, 405B, ...; default: hub_checkpoint's sizes, else debug
        overrides: sizes that replace the flavor's, e.g. {n_layers = 2}
        hub_checkpoint: folder in Hugging Face's format (config.json, *.safetensors) to start from, or a
            name on the hub
        load_weights: start from the weights of hub_checkpoint; false: only its sizes, with fresh weights
        config: config.json, or the folder it is in, whose sizes a model with fresh weights has
    """

    architecture: str = "llama"
    flavor: str = ""
    overrides: dict[str, object] = key({})  # noqa: RUF009
    hub_checkpoint: str = ""
    load_weights: bool = True
    config: str = ""


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes tokens.

    Attributes:
        kind: which library reads it; bytes: none, each byte is a token (257 with the end token)
        path: model file; empty with sentencepiece: that of model.hub_checkpoint, else one is trained on the corpus and
            cached
        bos: documents of plain text begin with the tokenizer's BOS token, if it has one, as Gemma's and Llama's do;
            false: without it
        vocab_size: pieces of a SentencePiece model trained on the corpus; beside model.hub_checkpoint, any number but
            the default asks for one
    """

    kind: str = key("sentencepiece", choices=("sentencepiece", "bytes", "huggingface"))
    path: str = key("", read_by=("sentencepiece", "huggingface"))
    bos: bool = True
    vocab_size: int = key(4096, least=MIN_PIECES)

    @property
    def trained(self) -> bool:
        """Whether it is trained on the corpus."""
        return self.kind == "sentencepiece" and not self.path


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
        loss_chunk_tokens: tokens whose logits exist at the same time
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
    loss_chunk_tokens: int = key(1024, least=1)
    z_loss: float = key(0.0, least=0)
    router_bias_update: float = key(0.0, least=0)
    loss_normalization: str = key("token", choices=("token", "conversation", "batch_tokens"))


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
        fsdp_reshard: whether a block's gathered weights are freed after its forward; auto: never in a pipeline, else
            always
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
        enable: compile each block, and without tensor parallelism the loss between its matrix products
    """

    enable: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """When the run is saved.

    Attributes:
        enable: save, and resume from the newest complete checkpoint
        interval: optimizer steps between checkpoints; the end of a stage is always saved
        interval_minutes: also save this many minutes after the last save; 0: never
        keep: newest checkpoints kept, of those that verify; the end of each stage is kept for good
        asynchronous: write while training goes on, from a copy in host memory
        export: also write the end of each stage for transformers, in hub/step-N
        timeout_seconds: a save that waits longer for another rank has failed
    """

    enable: bool = True
    interval: int = key(100, least=1)
    interval_minutes: float = key(0.0, least=0)
    keep: int = key(2, least=1)
    asynchronous: bool = True
    export: str = key("no", choices=("no", "float32", "bfloat16"))
    timeout_seconds: float = key(1800.0, least=1, most=MAX_SECONDS)


@dataclass(frozen=True)
class Health:
    """What happens after a step with non-finite values, or a spike.

    Attributes:
        on_nonfinite: halt the job at a step with non-finite values, or skip it; too many skips in a row roll back
        on_spike: a finite step far above the others: warn, or handle it as on_nonfinite says
        spike_threshold: standard deviations above the median (from the MAD, at least 5 %) that count as a spike; 0:
            never
        max_consecutive_skips: skipped steps in a row before the run rolls back: it loads the last good checkpoint, and
            skips the text read since
        max_rollbacks: rollbacks in a run before the job halts; 0: it halts without one
        replay: repeat a step with non-finite values, name the module, rank and token where they begin, and keep the
            tensors of the first three in health/
    """

    on_nonfinite: str = key("halt", choices=("halt", "skip"))
    on_spike: str = key("warn", choices=("warn", "handle"))
    spike_threshold: float = key(10.0, least=0)
    max_consecutive_skips: int = key(5, least=1)
    max_rollbacks: int = key(2, least=0)
    replay: bool = True


@dataclass(frozen=True)
class Metrics:
    """What is recorded of the run.

    Attributes:
        interval: optimizer steps between TensorBoard points, and between the records in metrics.jsonl that also hold
            losses by position and source, memory, mfu_mask and expert load
        tensorboard: write tensorboard/ (metrics.jsonl is always written)
        wandb: Weights & Biases project that also gets every metric (extra wandb); empty: none
        peak_tflops: peak of one rank's device, for MFU; 0: from NVIDIA's data sheets, else measured at start
    """

    interval: int = key(1, least=1)
    tensorboard: bool = True
    wandb: str = ""
    peak_tflops: float = key(0.0, least=0)


@dataclass(frozen=True)
class Passkey:
    """Keys hidden in held-out text and asked for at its end; right if each token of the key is the likeliest.

    Attributes:
        variants: passkey: one key; multi_key: several, one asked for; variable_tracking: a chain of assignments
        lengths: tokens of a prompt; empty: a quarter, half and all of the stage's length
        depths: positions of the key, evenly from the start of a prompt to its question
        trials: prompts for each length and depth; 0: none
        needle: text that states a key, with {name} (five letters) and {key} (seven digits) or {word} (seven small
            letters); {key:.4} takes the first four
        question: text that asks for it and ends with the key
    """

    variants: tuple[str, ...] = key(("passkey",), choices=names.VARIANTS)
    lengths: tuple[int, ...] = key((), least=1)
    depths: int = key(5, least=1)
    trials: int = key(4, least=0)
    needle: str = " One of the special magic numbers for {name} is: {key}. "
    question: str = key(
        " What is the special magic number for {name} mentioned in the text? The special magic number for {name} "
        "mentioned in the text is {key}"
    )


@dataclass(frozen=True)
class Profiling:
    """Steps to trace, each into profile/ with a table of where its time went.

    Attributes:
        steps: optimizer steps to trace with torch.profiler, e.g. [10, 20]
        ranks: ranks that trace them
        memory_snapshot: CUDA: also keep a snapshot of allocations, for pytorch.org/memory_viz
    """

    steps: tuple[int, ...] = key((), least=1)
    ranks: tuple[int, ...] = key((0,), least=0)
    memory_snapshot: bool = False


@dataclass(frozen=True)
class Evaluation:
    """What is measured on held-out text.

    Attributes:
        interval: steps between evaluations; 0: only at the end of each stage
        tokens: held-out tokens of one validation
        max_share: fraction of the run's time for evaluation; beyond it, those within a stage and parts of
            others are skipped
        position_seq_len: sequence length for loss by position; 0: the stage's; a longer one looks beyond it
        context_gain_tokens: context gain is the loss with at most this many tokens of context minus the loss with all;
            0: none
    """

    interval: int = key(0, least=0)
    tokens: int = key(32768, least=1)
    max_share: float = key(0.05, least=0, most=1)
    position_seq_len: int = key(0, least=0)
    context_gain_tokens: int = key(4096, least=0)
    passkey: Passkey = field(default_factory=Passkey)


@dataclass(frozen=True)
class StageLR(LRScheduler):
    """Learning rate of one stage, over its own steps.

    Attributes:
        peak: peak learning rate; default optimizer.lr
    """

    peak: float | None = key(None, least=0, most=100)


@dataclass(frozen=True)
class Stage:
    """One length of the curriculum. Give it `steps`, `tokens` or `until`.

    Attributes:
        name: shown in logs; default: the length. `-stage-N` is added if an earlier stage has that name
        seq_len: tokens of a sequence; where cp is above 1 divisible by 2 x cp, and always by cp x tp
        steps: optimizer steps
        tokens: tokens, instead of steps (rounded up to whole steps)
        until: instead of steps: the stage ends when every bound holds after an evaluation: validation_loss,
            short_loss_rise (relative rise of the loss at the first stage's length since that stage's end),
            passkey_accuracy (at the stage's length); and max_tokens, which ends it anyway
        global_batch_tokens: tokens of one optimizer step over all ranks
        cp: context-parallel degree; default parallel.cp; -1: every dp_shard x cp rank
        strategy: exchange; default context_parallel.strategy
        tp: tensor-parallel ranks; default parallel.tp; a change of tp or pp relaunches the job from its checkpoint
        pp: pipeline ranks; default parallel.pp
        optimizer_state: moments at the stage's start; reset: zero
    """

    name: str = ""
    seq_len: int = key(0, least=1)  # has no default: 0 is refused
    steps: int = key(0, least=0)
    tokens: int = key(0, least=0)
    until: dict[str, float] = key({})  # noqa: RUF009
    global_batch_tokens: int = key(0, least=1)
    cp: int | None = key(None, least=-1, excluded=0)
    strategy: str | None = key(None, choices=names.STRATEGIES)
    tp: int | None = key(None, least=-1, excluded=0)
    pp: int | None = key(None, least=-1, excluded=0)
    rope: Rope | None = None
    lr: StageLR | None = None
    optimizer_state: str = key("keep", choices=("keep", "reset"))
    activation: StageActivation = field(default_factory=StageActivation)
    data: StageData = field(default_factory=StageData)

    @property
    def most_steps(self) -> int:
        """Optimizer steps, at most: `until` may end the stage earlier."""
        tokens = self.tokens or self.until.get("max_tokens", 0)
        return self.steps or math.ceil(tokens / self.global_batch_tokens)


@dataclass(frozen=True)
class Curriculum:
    """The stages, run in order."""

    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class Config:
    """The whole file. Section and key names are those of the TOML."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallel: Parallel = field(default_factory=Parallel)
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    activation: Activation = field(default_factory=Activation)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    health: Health = field(default_factory=Health)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    evaluation: Evaluation = field(default_factory=Evaluation)
    curriculum: Curriculum = field(default_factory=Curriculum)

    @property
    def sync_replicas_once_per_step(self) -> bool:
        """Whether replicas all-reduce gradients once a step without a pipeline; with one they always do, in fp32.

        Until then FSDP2 adds them up on the device in reduce_dtype, where bf16 would lose digits each time.
        """
        return self.training.reduce_dtype == "float32" and not self.parallel.fsdp_cpu_offload

    def with_keys(self, **sections: Mapping[str, object]) -> "Config":
        """This config with other values of some keys, by section and key."""
        return replace(self, **{name: replace(getattr(self, name), **keys) for name, keys in sections.items()})
