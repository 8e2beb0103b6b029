"""The sections of the TOML file as frozen dataclasses: every key with its type, default and meaning.

What each `Attributes:` says of a key is its help text: `--help` and `docs/config.md` are made from it. Here are the
whole file, its model and its stages; the text (data.py), RoPE (rope.py), what a step computes (training.py) and what
goes on around the steps (run.py) have files of their own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchtitan_cp.config import names
from torchtitan_cp.config.data import Data, StageData
from torchtitan_cp.config.key import key
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.run import Checkpoint, Evaluation, Health, Job, Metrics, Profiling
from torchtitan_cp.config.training import (
    Activation,
    Compile,
    ContextParallel,
    Lora,
    LRScheduler,
    Optimizer,
    Parallel,
    StageActivation,
    Training,
)

MIN_PIECES = 300  # smallest trained vocabulary: it contains the 256 bytes


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
        checkpoint: folder of another run (its newest checkpoint), or one of its step-N folders, whose weights training
            starts from; what the file leaves out of [model], [tokenizer] and the stages' RoPE is that run's
        adapter: folder of a PEFT adapter of hub_checkpoint, with which [lora] goes on
    """

    architecture: str = "llama"
    flavor: str = ""
    overrides: dict[str, object] = key({})  # noqa: RUF009
    hub_checkpoint: str = ""
    load_weights: bool = True
    config: str = ""
    adapter: str = ""
    checkpoint: str = ""

    @property
    def names_a_model(self) -> bool:
        """Whether a key but `checkpoint` says what the model is."""
        return bool(self.flavor or self.overrides or self.hub_checkpoint or self.config)

    @property
    def loads_weights(self) -> bool:
        """Whether a new run begins with weights that were trained before."""
        return bool(self.checkpoint or (self.hub_checkpoint and self.load_weights))


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes tokens.

    Attributes:
        kind: which library reads it; bytes: none, each byte is a token (257 with the end token)
        path: model file, or the folder it is in; empty with sentencepiece: that of model.hub_checkpoint, else one is
            trained on the corpus and cached
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
    lora: Lora | None = None
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
    def sync_once_per_step(self) -> bool:
        """Whether gradients reach replicas, or the shards of one rank, once a step; with a pipeline all do, in fp32.

        Until then FSDP2 adds them up on the device in reduce_dtype, where bf16 would lose digits each time.
        """
        return self.training.reduce_dtype == "float32" and not self.parallel.fsdp_cpu_offload

    def with_keys(self, **sections: Mapping[str, object]) -> "Config":
        """This config with other values of some keys, by section and key."""
        return replace(self, **{name: replace(getattr(self, name), **keys) for name, keys in sections.items()})
