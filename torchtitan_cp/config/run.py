"""What goes on around the steps: files and limits of a job, what is saved, measured and watched.

Sections of the TOML file, as in sections.py.
"""

from dataclasses import dataclass, field

from torchtitan_cp.config import names
from torchtitan_cp.config.key import key

MAX_SECONDS = 1e8  # three years; torch counts in nanoseconds


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
        on_nonfinite: halt the job at a step with non-finite values, or skip it; after five skips in a row the run
            rolls back: it loads the last good checkpoint, and skips the text read since
        on_spike: a finite step far above the others: warn, or handle it as on_nonfinite says
        spike_threshold: standard deviations above the median (from the MAD, at least 5 %) that count as a spike; 0:
            never
        max_rollbacks: rollbacks in a run before the job halts; 0: it halts without one
        replay: repeat a step with non-finite values, name the module, rank and token where they begin, and keep the
            tensors of the first three in health/
    """

    on_nonfinite: str = key("halt", choices=("halt", "skip"))
    on_spike: str = key("warn", choices=("warn", "handle"))
    spike_threshold: float = key(10.0, least=0)
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
        trials: prompts for each length and each of five positions of the key, from the start to the question; 0: none
        needle: text that states a key, with {name} (five letters) and {key} (seven digits) or {word} (seven small
            letters); {key:.4} takes the first four
        question: text that asks for it and ends with the key
    """

    variants: tuple[str, ...] = key(("passkey",), choices=names.VARIANTS)
    lengths: tuple[int, ...] = key((), least=1)
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
        interval: steps between evaluations; -1: a tenth of the stage's, at least 10; 0: only at the end of each stage
        at_start: evaluate before the first step too, if max_share has time for it; later evaluations say what changed
        tokens: held-out tokens of one validation
        max_share: fraction of the run's time for evaluation, half of it for those within a stage; what would take
            more is left out
        position_seq_len: sequence length for loss by position; 0: the stage's; a longer one looks beyond it
        context_gain_tokens: context gain is the loss with at most this many tokens of context minus the loss with all;
            0: none
    """

    interval: int = key(-1, least=-1)
    at_start: bool = True
    tokens: int = key(32768, least=1)
    max_share: float = key(0.05, least=0, most=1)
    position_seq_len: int = key(0, least=0)
    context_gain_tokens: int = key(4096, least=0)
    passkey: Passkey = field(default_factory=Passkey)
