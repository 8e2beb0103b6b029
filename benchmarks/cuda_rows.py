"""What `benchmarks/cuda.sh` trains to time steps: models, lengths and settings, each a config for one GPU.

A test plans every row. `python -m benchmarks.cuda_rows` prints the table of docs/cuda.md.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.budget import one_gpu, predict
from benchmarks.cuda import ROOT
from benchmarks.cuda_training import SHORT
from benchmarks.plan import draw_lengths
from models import ARCHITECTURES
from torchtitan_cp.attention.kernels import KERNELS, Case
from torchtitan_cp.config import load_config
from torchtitan_cp.training.registry import register

LETTERS = "abcdefghijklmnopqrstuvwxyz     "
HOPPER, HEAD_DIM = (9, 0), 128


@dataclass(frozen=True)
class Row:
    """A model that trains on random text, a micro-batch a step.

    Attributes:
        name: of the case.
        flavor: of the architecture; layers and vocabulary: 0 for the flavor's own.
        length: of a sequence, in tokens; sequences: in the micro-batch.
        mode, tiles: of activation.checkpoint and activation.mlp_tiles.
        options: further overrides.
        documents: lengths of those packed into a sequence, whose tokens see their own document alone; (): none.
        kernel: of attention.
        compiled: blocks and loss.
        warm_up: steps that compile and fill caches; steps: behind them.
        published: tokens/s of a GPU that others published for this shape and length; 0: none.
    """

    name: str
    flavor: str
    length: int
    mode: str = "selective"
    tiles: int = 1
    sequences: int = 1
    layers: int = 0
    vocabulary: int = 0
    architecture: str = "llama"
    options: tuple[str, ...] = ()
    documents: tuple[int, ...] = ()
    kernel: str = "auto"
    compiled: bool = True
    warm_up: int = 2
    steps: int = 6
    published: float = 0.0

    def overrides(self, corpus: Path) -> list[str]:
        """Of stdlib_on_cpu.toml, with a corpus that `write_corpus` made."""
        sizes = {"n_layers": self.layers, "vocab_size": self.vocabulary}
        stage = f"seq_len = {self.length}, steps = {self.warm_up + self.steps}"
        stage += f", global_batch_tokens = {self.length * self.sequences}"
        stage += ", data = {document_mask = true}" if self.documents else ""
        return [
            *SHORT,
            *("--data.source=jsonl", f"--data.path={corpus}", "--data.max_document=0"),
            *(f"--model.architecture={self.architecture}", f"--model.flavor={self.flavor}"),
            *(f"--model.overrides.{name}={size}" for name, size in sizes.items() if size),
            *(f"--activation.checkpoint={self.mode}", f"--activation.mlp_tiles={self.tiles}"),
            *("--training.compute_dtype=bfloat16", "--training.loss_chunk_tokens=4096"),
            f"--training.micro_batch_sequences={self.sequences}",
            f"--compile.enable={'true' if self.compiled else 'false'}",
            *(f"--context_parallel.kernel={self.kernel}", "--optimizer.lr=1e-5"),
            *self.options,
            f"--curriculum.stages=[{{{stage}}}]",
        ]

    @property
    def lacking(self) -> str | None:
        """Why its kernel cannot run in this version on Hopper, or None."""
        if self.kernel not in ("auto", *KERNELS):
            return f"there is no kernel {self.kernel}; there are {', '.join(KERNELS)}"
        dense = not self.documents
        case = Case("cuda", torch.bfloat16, HEAD_DIM, HEAD_DIM, dense=dense, capability=HOPPER)
        return None if self.kernel == "auto" else KERNELS[self.kernel].refusal(case)


EIGHT_LAYERS: dict[str, Any] = {"flavor": "8B", "vocabulary": 32064, "layers": 8}
HALF: dict[str, Any] = EIGHT_LAYERS | {"layers": 4, "tiles": 16}
QUARTER: dict[str, Any] = EIGHT_LAYERS | {"layers": 2, "tiles": 16, "warm_up": 1, "steps": 1}
OFFLOADED = ("--activation.offload=true",)
LORA = ("--lora.rank=16",)
# The 8B's layers, in as many as fit, at the lengths that one H100 holds.
ROWS: dict[str, tuple[Row, ...]] = {
    "layers": (
        Row("8 layers of the 8B, 32K, selective", length=32768, **EIGHT_LAYERS),
        Row("8 layers of the 8B, 4 x 8K, selective", length=8192, sequences=4, **EIGHT_LAYERS),
        Row("8 layers of the 8B, 32K, attention saved", length=32768, mode="attention_saved", **EIGHT_LAYERS),
        Row("8 layers of the 8B, 4 x 8K, all kept", length=8192, sequences=4, mode="none", **EIGHT_LAYERS),
        Row("8 layers of the 8B, 32K, selective, flash4", length=32768, kernel="flash4", **EIGHT_LAYERS),
        Row("8 layers of the 8B, 32K, all recomputed", length=32768, mode="full", **EIGHT_LAYERS),
    ),
    "long": (
        Row("4 layers of the 8B, 128K, attention saved", length=1 << 17, mode="attention_saved", steps=2, **HALF),
        Row(
            "2 layers of the 8B, 512K, attention saved and offloaded",
            length=1 << 19, mode="attention_saved", options=OFFLOADED, **QUARTER,
        ),
        Row("4 layers of the 8B, 128K, selective", length=1 << 17, steps=2, **HALF),
        Row(
            "4 layers of the 8B, 128K, attention saved and offloaded",
            length=1 << 17, mode="attention_saved", options=OFFLOADED, steps=2, **HALF,
        ),
    ),
    "packed": (
        Row("8 layers of the 8B, 32K, documents of 8K", length=32768, documents=(8192,) * 4, **EIGHT_LAYERS),
        Row(
            "8 layers of the 8B, 32K, documents of 8K, flash4",
            length=32768, documents=(8192,) * 4, kernel="flash4", **EIGHT_LAYERS,
        ),
        Row(
            "8 layers of the 8B, 32K, documents of 3K on average",
            length=32768, documents=draw_lengths("log-normal", 32768, 11, seed=1), **EIGHT_LAYERS | {"steps": 10},
        ),
    ),
    "published": (
        Row("Qwen3-0.6B, 8K, all recomputed", "qwen3-0.6B", 8192, "full", published=26005),
        Row("Qwen3-0.6B, 16K, all recomputed", "qwen3-0.6B", 16384, "full", published=25486),
        Row("Qwen3-4B by LoRA of rank 16, 16K", "qwen3-4B", 16384, options=LORA, published=6229),
        Row("Llama 3 8B by LoRA of rank 16, 2 x 4K", "8B", 4096, sequences=2, options=LORA, published=12473),
        Row("Qwen3-0.6B, 16K, selective", "qwen3-0.6B", 16384, published=25486),
        Row("Qwen3-0.6B, 8K, selective", "qwen3-0.6B", 8192, published=26005),
        Row(
            "Qwen3-4B by LoRA of rank 16, 64K",
            "qwen3-4B", 65536, "attention_saved", tiles=8, options=LORA, steps=2, published=4164,
        ),
    ),
    "mixed": (
        Row("Qwen3.5-0.8B, 32K", "0.8B", 32768, architecture="qwen3_5"),
        Row("3 layers of Qwen3-30B-A3B, 32K", "qwen3-30B-A3B", 32768, layers=3, architecture="moe"),
    ),
}  # fmt: skip


def write_corpus(row: Row, path: Path) -> None:
    """Random letters in documents of the row's lengths: a token a letter, and one for the end.

    Four sequences, whose documents come in random order: where these differ in length, no two sequences are alike.
    """
    generator = random.Random(0)
    lengths = [*(row.documents or (row.length,))] * 4
    generator.shuffle(lengths)
    with path.open("w") as file:
        for length in lengths:
            text = "".join(generator.choices(LETTERS, k=length - 1))
            file.write(json.dumps({"text": text}) + "\n")


def rehearsed(rows: Sequence[Row]) -> list[Row]:
    """A tiny row of each kind: models, adapters, documents."""
    kinds = {(row.architecture, row.options == LORA, bool(row.documents)): row for row in rows}
    tiny: dict[str, Any] = {"flavor": "debug", "layers": 4, "vocabulary": 0, "length": 256, "steps": 1}
    tiny |= {"compiled": False, "kernel": "auto"}
    return [replace(row, **tiny, documents=(64,) * 4 if row.documents else ()) for row in kinds.values()]


def goal_table() -> list[str]:
    """Lines of Markdown: rows with what the planner predicts on an H100, and cells for what is measured.

    Those that name a kernel are left out: whether that is there, and its rate, differ between machines.
    """
    register(ARCHITECTURES)
    lines = [
        "| on one H100, bf16 | predicted tokens/s | predicted MFU | predicted GiB | measured tokens/s | measured MFU "
        "| measured GiB | published tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for rows in ROWS.values() for row in rows if row.kernel == "auto"):
        config = load_config(ROOT / "train_configs" / "stdlib_on_cpu.toml", row.overrides(Path("corpus.jsonl")))
        step = predict(config, one_gpu("h100-80g"), row.documents)
        cells = [row.name, f"{step.tokens_per_second:,.0f}", f"{step.mfu:.1%}", f"{step.peak_gib:.0f}"]
        cells += [*["not measured"] * 3, f"{row.published:,.0f}" if row.published else "-"]
        lines.append(f"| {' | '.join(cells)} |".replace("%", " %"))
    return lines


if __name__ == "__main__":
    print("\n".join(goal_table()))
