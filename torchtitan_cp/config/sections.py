"""The sections of the TOML file as frozen dataclasses: every key with its type, default and meaning.

The help texts here are the one home of what a key means: `--help` and `docs/config.md` are made from them.
"""

from dataclasses import dataclass, field
from typing import Any

STRATEGIES = ("auto", "ring", "all_gather", "all_to_all", "hybrid")
KERNELS = ("auto", "cpu", "flash", "cudnn", "efficient", "flex", "reference")
TRANSFERS = ("exact", "float8")
LAYOUTS = ("auto", "contiguous", "zigzag", "balanced")
ACTIVATIONS = ("none", "full", "selective", "attention_saved")
FLOAT8_RECIPES = ("none", "tensorwise", "rowwise")
RESHARD = ("auto", "always", "never")
PP_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
ROW_SOURCES = ("jsonl", "parquet", "huggingface")
DOCUMENT_ORDERS = ("shuffled", "related")
PACKINGS = ("concat", "best_fit")
SCHEDULE_SHAPES = ("cosine", "linear", "wsd", "constant")
RUNGS = ("rollback", "lower_lr")
ON_SPIKE = ("warn", "trip")
FAULTS = ("data", "embedding", "forward", "backward", "gradient", "weight")
FAULT_KINDS = ("nan", "inf", "spike")
ROPE_KINDS = ("none", "linear", "ntk", "yarn", "longrope", "llama3")


def key(default: Any, help: str, *, choices: tuple[str, ...] = (), least: float | None = None) -> Any:
    """A documented key: its default, what it means, and what values it takes."""
    metadata = {"help": help, "choices": choices, "least": least}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Job:
    """What the run is called and where its files go."""

    dump_folder: str = key(
        "outputs/run",
        "folder of this run: config.toml, metrics.jsonl, a trained tokenizer, tensorboard/, checkpoints/",
    )
    description: str = key("", "one line about the run, shown at start")
    timeout_seconds: float = key(300.0, "a step, validation or final save that takes longer ends the job", least=1)
    startup_timeout_seconds: float = key(
        1800.0, "the same of what comes before: joining, building, loading, each stage's first step", least=1
    )
    max_restarts: int = key(3, "times that run_train.sh starts the ranks again after one died or hung", least=0)


@dataclass(frozen=True)
class Model:
    """Which network is trained."""

    architecture: str = key("llama", "architecture by name, from models/")
    flavor: str = key("", "sizes by name: debug, 1B, 3B, 8B, 70B, 405B, ...; default: hub_checkpoint's, else debug")
    overrides: dict[str, Any] = key({}, "sizes that replace the flavor's, e.g. {n_layers = 2}")  # noqa: RUF009
    hub_checkpoint: str = key("", "folder in Hugging Face's format (config.json, *.safetensors) to start from")


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes tokens."""

    kind: str = key("sentencepiece", "which library reads it", choices=("sentencepiece", "bytes", "huggingface"))
    path: str = key("", "model file; empty with sentencepiece: one is trained on the corpus and cached")
    vocab_size: int = key(4096, "pieces of a SentencePiece model trained on the corpus", least=300)


@dataclass(frozen=True)
class SourceKeys:
    """Where text, or tokens, come from, and what of them is a document."""

    source: str = key(
        "python-stdlib",
        "python-stdlib: the running interpreter's own library; text: a folder or glob; jsonl: .jsonl[.gz|.zst]; "
        "parquet: .parquet (extra parquet); huggingface: a dataset by name or folder (extra hub)",
        choices=("python-stdlib", "text", *ROW_SOURCES),
    )
    path: str = key("", "file, folder or glob; with huggingface the dataset's name or a local folder")
    subset: str = key("", "huggingface: the dataset's configuration, where it has several")
    split: str = key("train", "huggingface: the split that is read")
    revision: str = key("", "huggingface: commit or tag of a dataset by name; without it a change there goes unnoticed")
    text_field: str = key("text", "field (column) of a row that holds the text")
    token_field: str = key("", "field (column) of a row that holds token ids of this tokenizer, instead of text_field")
    group_field: str = key("", "field (column) that rows of one group share, as a repository; empty: none is related")
    group_depth: int = key(
        0, "text: leading folders that name a document's group, 1 where each is a repository; 0: all", least=0
    )
    document: str = key(
        "file",
        "what one document is: a file, or a folder's files joined in order (up to 1 MiB); a row is always one",
        choices=("file", "folder"),
    )
    min_document: int = key(0, "documents of fewer tokens are counted and left out", least=0)
    max_document: int = key(0, "documents of more tokens are split into even parts; 0: none is", least=0)
    validation_fraction: float = key(0.02, "share of files (or rows) held out, chosen by hash", least=0)

    @property
    def where(self) -> str:
        """How messages name the table these keys stand in."""
        return "data"


@dataclass(frozen=True)
class DataSource(SourceKeys):
    """One of several sources: the keys of [data] for it, and a name. Each is kept as tokens of its own."""

    name: str = key("", "what mixtures, tables and messages call it")

    @property
    def where(self) -> str:
        """See SourceKeys."""
        return f"data.sources[{self.name!r}]"


@dataclass(frozen=True)
class Data(SourceKeys):
    """Which text is read, and how it is kept on disk."""

    sources: tuple[DataSource, ...] = key((), "[[data.sources]] tables, in place of the keys above for one source")
    mixture: dict[str, float] = key(  # noqa: RUF009
        {}, "weight of each source by name; default: by their tokens; a stage may set its own"
    )
    max_epochs: dict[str, float] = key(  # noqa: RUF009
        {}, "how often a source may be read in the run, by name; then its weight goes to the others"
    )
    order: str = key(
        "shuffled", "related keeps documents of one group (folder, repository) together", choices=DOCUMENT_ORDERS
    )
    separator: int = key(-1, "token id put after each document, beside the tokenizer's own end; -1: none", least=-1)
    packing: str = key(
        "concat",
        "concat cuts documents at sequence ends; best_fit keeps as many whole as fit; both drop and pad nothing",
        choices=PACKINGS,
    )
    packing_window: int = key(256, "best_fit: sequences packed at once", least=1)
    document_mask: bool = key(False, "tokens see their own document only, and its last token predicts nothing")
    restart_positions: bool = key(False, "positions begin at 0 in each document")
    workers: int = key(0, "processes that read sequences and plan their attention; 0: a thread", least=0)
    cache_folder: str = key("outputs/cache", "where tokens and the trained tokenizer are kept between runs")
    prefetch_batches: int = key(2, "steps read ahead of the training loop", least=1)

    def by_name(self) -> dict[str, SourceKeys]:
        """Every source, in the file's order; the one that [data] itself describes is called `corpus`."""
        return {entry.name: entry for entry in self.sources} or {"corpus": self}


@dataclass(frozen=True)
class Training:
    """Numbers of one optimizer step."""

    seed: int = key(0, "seed of weights and data order", least=0)
    compute_dtype: str = key(
        "bfloat16", "dtype of forward and backward; weights and reductions are fp32", choices=("float32", "bfloat16")
    )
    float8: str = key(
        "none",
        "CUDA from compute capability 8.9: the blocks' linear layers multiply in 8 bits (package torchao), with a "
        "scale for each tensor or row",
        choices=FLOAT8_RECIPES,
    )
    deterministic: bool = key(False, "only kernels that give the same bits every time; slower on CUDA")
    micro_batch_sequences: int = key(1, "sequences a data-parallel rank runs at once", least=1)
    reduce_dtype: str = key(
        "float32", "dtype in which gradients are summed over ranks", choices=("float32", "bfloat16")
    )
    max_grad_norm: float = key(1.0, "gradients are clipped to this global norm; 0 never clips", least=0)
    loss_chunk_tokens: int = key(1024, "tokens whose logits exist at one time", least=1)
    z_loss: float = key(0.0, "times logsumexp(logits)^2 of each token is added to the loss, e.g. 1e-4", least=0)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with numbers of their own."""

    match: str = key("", "regular expression found anywhere in a parameter's name")
    lr_scale: float = key(1.0, "times the learning rate of the step", least=0)
    weight_decay: float | None = key(None, "default: as without the rule", least=0)


@dataclass(frozen=True)
class Optimizer:
    """Who updates the parameters, and its numbers."""

    name: str = key(
        "adamw",
        "muon orthogonalises the steps of the blocks' matrices; all else is AdamW's",
        choices=("adamw", "muon"),
    )
    lr: float = key(3e-4, "peak learning rate", least=0)
    beta1: float = key(0.9, "decay of the first moment", least=0)
    beta2: float = key(0.95, "decay of the second moment", least=0)
    eps: float = key(1e-8, "added to the root of the second moment", least=0)
    weight_decay: float = key(0.1, "decoupled weight decay of matrices (norms and biases have none)", least=0)
    muon_momentum: float = key(0.95, "muon: share of the old momentum kept in a step", least=0)
    implementation: str = key(
        "fused", "how AdamW with float32 state runs; 8bit compiles its own", choices=("fused", "foreach", "for-loop")
    )
    state: str = key(
        "float32",
        "AdamW's moments; 8bit (package torchao) resumes on other ranks if shards are whole blocks of 256 values",
        choices=("float32", "8bit"),
    )
    offload_state: bool = key(False, "CUDA: keep the state in host memory between steps, copied in and out of each")
    groups: tuple[ParameterGroup, ...] = key(
        (),
        "[[optimizer.groups]] tables of match (a regex), lr_scale and weight_decay; the first that matches rules",
    )


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate over the whole run; a stage with its own `lr` leaves it."""

    shape: str = key("cosine", "curve after warm-up", choices=SCHEDULE_SHAPES)
    warmup_steps: int = key(0, "steps of linear warm-up from zero", least=0)
    decay_fraction: float = key(0.2, "wsd: share of the steps spent decaying", least=0)
    end_fraction: float = key(0.1, "last learning rate over the peak", least=0)


@dataclass(frozen=True)
class Parallel:
    """Degrees of the mesh; their product is the number of ranks. -1 takes what is left (one key at most)."""

    pp: int = key(1, "pipeline ranks")
    pp_schedule: str = key("1f1b", "order of forwards and backwards in the pipeline", choices=PP_SCHEDULES)
    pp_stages_per_rank: int = key(0, "stages of one pipeline rank; 0: as few as the schedule takes", least=0)
    pp_split: tuple[int, ...] = key((), "first layer of every stage but the first; default: split by cost")
    dp_replicate: int = key(1, "replicas of the sharded model (HSDP)")
    dp_shard: int = key(-1, "data-parallel ranks that shard the parameters")
    cp: int = key(1, "context-parallel ranks; a stage may set its own")
    tp: int = key(1, "tensor-parallel ranks; they share a node")
    async_tp: bool = key(False, "CUDA, compiled blocks: tp's messages travel in parts, beside the products they feed")
    fsdp_reshard: str = key(
        "auto",
        "whether a block's gathered weights are freed after its forward; auto: always, and never in a pipeline",
        choices=RESHARD,
    )
    fsdp_prefetch: int = key(1, "blocks whose weights are gathered ahead", least=1)
    fsdp_cpu_offload: bool = key(False, "keep weights, gradients and optimizer state in host memory (CUDA)")


@dataclass(frozen=True)
class ContextParallel:
    """How attention crosses ranks."""

    strategy: str = key("auto", "exchange between ranks; a stage may set its own", choices=STRATEGIES)
    all_to_all_ranks: int = key(2, "hybrid: neighbouring ranks that trade heads inside the ring", least=1)
    kernel: str = key("auto", "attention kernel on one rank", choices=KERNELS)
    layout: str = key("auto", "which chunks of the sequence a rank holds", choices=LAYOUTS)
    kv_transfer: str = key("exact", "float8 carries keys and values in 8 bits (ring, all_gather)", choices=TRANSFERS)


@dataclass(frozen=True)
class Activation:
    """What is kept between forward and backward."""

    checkpoint: str = key(
        "none",
        "none keeps all; full each block's input; attention_saved also the attention's output; selective also "
        "matrix products; the rest is recomputed",
        choices=ACTIVATIONS,
    )
    offload: bool = key(
        False, "CUDA: park what is kept in pinned host memory, copied out and back beside the computation"
    )
    mlp_tiles: int = key(1, "stretches of the sequence in which a block's MLP runs, one after the other", least=1)


@dataclass(frozen=True)
class Compile:
    """torch.compile of the blocks."""

    enable: bool = key(False, "compile each block")
    mode: str = key("default", "as torch.compile's", choices=COMPILE_MODES)


@dataclass(frozen=True)
class Checkpoint:
    """When the run is saved."""

    enable: bool = key(True, "save, and resume from the newest checkpoint that is whole")
    interval: int = key(100, "optimizer steps between checkpoints; the end of a stage is always saved", least=1)
    interval_minutes: float = key(0.0, "save also when so many minutes have passed since the last one; 0: no", least=0)
    keep: int = key(2, "newest checkpoints kept; the end of each stage is kept for good", least=1)
    keep_every_steps: int = key(0, "keep for good what was saved at a multiple of these steps; 0: none", least=0)
    asynchronous: bool = key(True, "write while training goes on, from a copy in host memory")
    export: str = key(
        "no", "write each stage's end for transformers too, in hub/step-N", choices=("no", "float32", "bfloat16")
    )
    timeout_seconds: float = key(1800.0, "a save that waits longer for another rank has failed", least=1)


@dataclass(frozen=True)
class Inject:
    """A fault made on purpose, for drills: where, when, and on which rank."""

    step: int = key(0, "a fault made on purpose: the optimizer step that it strikes, from 1; 0: none", least=0)
    steps: int = key(1, "how many steps in a row are struck", least=1)
    rank: int = key(0, "the rank it strikes", least=0)
    where: str = key(
        "forward",
        "data: a label that is no token; embedding, forward: a module's output; backward: the gradient it hands on; "
        "gradient: a weight's, before ranks sum them; weight: a weight itself",
        choices=FAULTS,
    )
    layer: int = key(0, "forward, backward, gradient, weight: number of the block", least=0)
    module: str = key("", "forward to weight: a module in the block by name, e.g. feed_forward.w2; empty: the block")
    kind: str = key("nan", "one value becomes NaN or infinite, or all 10,000 times as large", choices=FAULT_KINDS)
    transient: bool = key(False, "the fault is gone when its step is run again, as after a flipped bit")


@dataclass(frozen=True)
class Health:
    """What happens when a number is not finite, or far above what it was."""

    on_nonfinite: str = key(
        "halt", "halt the job at a step that is not finite, or skip it and go by policy", choices=("halt", "skip")
    )
    on_spike: str = key(
        "warn", "a finite step far above the others: only say so, or treat it as on_nonfinite says", choices=ON_SPIKE
    )
    spike_threshold: float = key(
        10.0, "standard deviations (from the MAD, at least 5 %) above the median that are a spike; 0: none is", least=0
    )
    spike_window: int = key(64, "healthy steps of the stage that median and MAD look back on", least=8)
    max_consecutive_skips: int = key(5, "skipped steps in a row after which policy goes on", least=1)
    policy: tuple[str, ...] = key(
        RUNGS,
        "what follows too many skips in a row: rollback loads the last good checkpoint and passes over the text since; "
        "lower_lr does so and trains at lr_factor for lr_steps; then the job halts",
        choices=RUNGS,
    )
    max_rollbacks: int = key(2, "rollbacks in a run, before the next rung", least=0)
    max_lr_cuts: int = key(1, "times in a run that the learning rate is lowered, before the job halts", least=0)
    lr_factor: float = key(0.1, "lower_lr: times the learning rate, each time", least=0)
    lr_steps: int = key(100, "lower_lr: healthy steps before the learning rate is back", least=1)
    replay: bool = key(True, "run a step that is not finite again, and name the module, rank and token it began with")
    bundles: int = key(3, "replays of which the tensors are kept in health/, for offline study", least=0)
    inject: Inject = field(default_factory=Inject, metadata={"help": "a fault made on purpose"})


@dataclass(frozen=True)
class Metrics:
    """What is recorded of the run."""

    interval: int = key(1, "optimizer steps between TensorBoard points and console lines", least=1)
    tensorboard: bool = key(True, "write tensorboard/ (metrics.jsonl is always written)")
    wandb: str = key("", "project of Weights & Biases that also gets all of it (extra wandb); empty: none")
    peak_tflops: float = key(0.0, "peak of one rank's device, for MFU; 0: from a table, on CPU measured", least=0)


@dataclass(frozen=True)
class Passkey:
    """Keys planted in held-out text and asked for at its end: right where each token of the key is the likeliest."""

    variants: tuple[str, ...] = key(
        ("passkey",), "passkey: one key; multi_key: several, one asked for; variable_tracking: a chain of assignments"
    )
    lengths: tuple[int, ...] = key((), "tokens of a prompt; empty: a quarter, half and all of the stage's length")
    depths: int = key(5, "places of the key, evenly from the top of a prompt to its question", least=1)
    trials: int = key(4, "prompts for each length and depth; 0: none", least=0)
    keys: int = key(4, "multi_key: how many are told", least=2)
    needle: str = key(
        " One of the special magic numbers for {name} is: {key}. ",
        "what tells a key, with {name} (five letters) and {key} (seven digits) or {word} (seven small letters); "
        "{key:.4} takes the first four",
    )
    question: str = key(
        " What is the special magic number for {name} mentioned in the text? The special magic number for {name} "
        "mentioned in the text is {key}",
        "what asks for it, which ends with the key",
    )


@dataclass(frozen=True)
class Profiling:
    """Steps that are traced, each into profile/ with a table of what its time went into."""

    steps: tuple[int, ...] = key((), "optimizer steps to trace with torch.profiler, e.g. [10, 20]")
    ranks: tuple[int, ...] = key((0,), "ranks that trace them")
    memory_snapshot: bool = key(False, "CUDA: keep a snapshot of allocations too, for pytorch.org/memory_viz")


@dataclass(frozen=True)
class Evaluation:
    """What is measured on held-out text."""

    interval: int = key(0, "steps between evaluations; 0: only at the end of each stage", least=0)
    tokens: int = key(32768, "held-out tokens of one validation", least=1)
    max_share: float = key(
        0.05,
        "of the run's time: above it, evaluations between stages' ends and parts of the others are left out",
        least=0,
    )
    position_seq_len: int = key(
        0,
        "tokens of the sequences of loss by position; 0: the stage's own length; a longer one looks beyond it",
        least=0,
    )
    context_gain_tokens: int = key(
        4096, "context gain: the loss with no more than so many tokens before, less that with all; 0: none", least=0
    )
    passkey: Passkey = field(default_factory=Passkey, metadata={"help": "retrieval"})


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a stage."""

    theta: float = key(10000.0, "base of the frequencies", least=1)
    kind: str = key("none", "scaling of the frequencies", choices=ROPE_KINDS)
    factor: float = key(1.0, "every kind but none: how much longer the context becomes", least=1)
    original_seq_len: int = key(0, "llama3, yarn, longrope: context length before scaling, in tokens", least=0)
    low_freq_factor: float = key(1.0, "llama3: below this many turns a dimension is scaled whole", least=0)
    high_freq_factor: float = key(4.0, "llama3: above this many turns a dimension is left alone", least=0)
    attention_factor: float = key(0.0, "yarn, longrope: times cos and sin; 0: as the paper has it from factor", least=0)
    beta_fast: float = key(32.0, "yarn: above this many turns a dimension is left alone", least=0)
    beta_slow: float = key(1.0, "yarn: below this many turns a dimension is scaled whole", least=0)
    mscale: float = key(0.0, "yarn: numerator of DeepSeek's attention factor; 0: the paper's", least=0)
    mscale_all_dim: float = key(0.0, "yarn: its denominator; given with mscale", least=0)
    truncate: bool = key(True, "yarn: the blend starts and ends at whole dimensions")
    long_factor: tuple[float, ...] = key((), "longrope: divisors of the head_dim / 2 frequencies")
    short_factor: tuple[float, ...] = key(
        (), "longrope: those of stages up to original_seq_len; without it long_factor serves every length"
    )


@dataclass(frozen=True)
class StageLR:
    """Learning rate of one stage, over its own steps."""

    peak: float | None = key(None, "peak; default optimizer.lr", least=0)
    shape: str = key("cosine", "curve after warm-up", choices=SCHEDULE_SHAPES)
    warmup_steps: int = key(0, "steps of linear warm-up from zero", least=0)
    decay_fraction: float = key(0.2, "wsd: share of the steps spent decaying", least=0)
    end_fraction: float = key(0.1, "last learning rate over the peak", least=0)


@dataclass(frozen=True)
class StageData:
    """What a stage takes its text by; keys that are left out are [data]'s."""

    mixture: dict[str, float] | None = key(None, "weight of each source by name")  # noqa: RUF009
    packing: str | None = key(None, "how documents become sequences", choices=PACKINGS)
    packing_window: int | None = key(None, "best_fit: sequences packed at once", least=1)
    document_mask: bool | None = key(None, "tokens see their own document only")
    restart_positions: bool | None = key(None, "positions begin at 0 in each document")
    short_share: float = key(
        0.0, "share of the sequences cut into ones of short_seq_len, for a mix of lengths", least=0
    )
    short_seq_len: int = key(0, "tokens of those; shapes stay, masks differ", least=0)
    growth_from: int = key(
        0, "tokens that attention sees in the stage's first step, growing to seq_len; 0: all", least=0
    )
    growth_steps: int = key(0, "steps over which it grows, by masks alone (SkyLadder)", least=0)


@dataclass(frozen=True)
class StageActivation:
    """What a stage keeps between forward and backward; keys that are left out are [activation]'s."""

    checkpoint: str | None = key(None, "what is recomputed", choices=ACTIVATIONS)
    offload: bool | None = key(None, "CUDA: park what is kept in host memory")
    mlp_tiles: int | None = key(None, "stretches of the sequence in which a block's MLP runs", least=1)


@dataclass(frozen=True)
class Stage:
    """One length of the curriculum. Give it `steps`, `tokens` or `until`."""

    name: str = key("", "shown in logs; default is the length")
    seq_len: int = key(0, "tokens of a sequence; divisible by 2 x cp", least=1)
    steps: int = key(0, "optimizer steps", least=0)
    tokens: int = key(0, "tokens, instead of steps (rounded up to whole steps)", least=0)
    until: dict[str, float] = key(  # noqa: RUF009
        {},
        "instead of steps: the stage ends when all hold, looked at after each evaluation: validation_loss, "
        "short_loss_rise (at the first stage's length, over its value at that stage's end), passkey_accuracy (at the "
        "stage's length); and max_tokens",
    )
    global_batch_tokens: int = key(0, "tokens of one optimizer step over all ranks", least=1)
    cp: int | None = key(None, "context-parallel degree; default parallel.cp; -1: every dp_shard x cp rank")
    strategy: str | None = key(None, "exchange; default context_parallel.strategy", choices=STRATEGIES)
    tp: int | None = key(None, "tensor-parallel ranks; a change of tp or pp relaunches the job from its checkpoint")
    pp: int | None = key(None, "pipeline ranks; default parallel.pp")
    rope: Rope | None = field(default=None, metadata={"help": "rotary embedding; default: model.hub_checkpoint's"})
    lr: StageLR | None = field(default=None, metadata={"help": "own schedule; default: the run's goes on"})
    optimizer_state: str = key("keep", "what the stage begins with; reset: moments of zero", choices=("keep", "reset"))
    activation: StageActivation = field(default_factory=StageActivation, metadata={"help": "what is kept"})
    data: StageData = field(default_factory=StageData, metadata={"help": "text of this stage"})


@dataclass(frozen=True)
class Curriculum:
    """The stages, run in order."""

    stages: tuple[Stage, ...] = field(default=(), metadata={"help": "[[curriculum.stages]], in order"})


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
