"""The names that the TOML chooses from, and how lengths are written.

The registries of the rooms have the same names, which a test compares.
"""

from dataclasses import dataclass

STRATEGIES = ("auto", "ring", "all_gather", "all_to_all", "hybrid")
KERNELS = ("auto", "cpu", "flash", "flash4", "cudnn", "efficient", "flex", "reference")
TRANSFERS = ("exact", "float8")
LAYOUTS = ("auto", "contiguous", "zigzag", "balanced", "documents")
ACTIVATIONS = ("none", "full", "selective", "attention_saved")
LIBRARY_SOURCES = ("python-stdlib", "python-docstrings", "python-recall")  # of the running interpreter
ROW_SOURCES = ("jsonl", "parquet", "huggingface")
OPTIMIZERS = ("adamw", "muon")
PACKINGS = ("concat", "best_fit")
LR_SHAPES = ("cosine", "linear", "wsd", "constant")
ROPE_KINDS = ("none", "linear", "ntk", "yarn", "longrope", "llama3")
VARIANTS = ("passkey", "multi_key", "variable_tracking")
MEASURED = ("validation_loss", "short_loss_rise", "passkey_accuracy")


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule of torch.distributed.pipelining.

    Attributes:
        torch_name: what torch calls it.
        stages_per_rank: the least number of pipeline stages on a rank.
        most: the largest number of them; None: any.
        splits_backward: weight gradients are computed apart from input gradients (zero bubble).
    """

    torch_name: str
    stages_per_rank: int = 1
    most: int | None = 1
    splits_backward: bool = False


SCHEDULES = {
    "1f1b": PipelineSchedule("1F1B"),
    "interleaved_1f1b": PipelineSchedule("Interleaved1F1B", 2, None),
    "interleaved_zero_bubble": PipelineSchedule("InterleavedZeroBubble", 2, None, splits_backward=True),
    "zbv_zero_bubble": PipelineSchedule("ZBVZeroBubble", 2, 2, splits_backward=True),
}


def format_bytes(size: int) -> str:
    """1.50 GiB, 12.0 MiB, 340 KiB, in the unit that suits the size."""
    for unit, name, digits in ((1 << 30, "GiB", 2), (1 << 20, "MiB", 1)):
        if size >= unit:
            return f"{size / unit:,.{digits}f} {name}"
    return f"{size / 1024:.0f} KiB"


def format_tokens(tokens: int) -> str:
    """512, 4K, 1M: in units of 2**10 or 2**20 tokens where these divide the number. The default name of a stage."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


def format_duration(seconds: float) -> str:
    """In the largest unit of which it has at least one."""
    for name, unit in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
