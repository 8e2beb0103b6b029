"""The planner beside figures that others published: the table of benchmarks/results/published.md, and what it assumes.

Where a setup has something that we lack, ours takes what comes nearest, and a note says so. No rate was fitted to a
row that is judged: torchtitan's cards ran at 500 W, and their rates come from its own runs of 8K, which are marked.
Attention is FlashAttention-2's in all of them.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.budget import config_of
from torchtitan_cp.planner.devices import ACCELERATORS, HOST_BYTES, Cluster, make_cluster
from torchtitan_cp.planner.estimate import Estimate, plan_config

GIB, TERA, DOCS_WIDTH = 2**30, 1e12, 120
TOLERANCE = 0.3  # of a throughput

# How sources count FLOPs: attention's pairs over the allowed ones of a causal mask, and what is run over what is new.
SQUARE = "square"  # every pair of the sequence, as PaLM's MFU
RECOMPUTED = "recomputed"  # every pair, and the forward again, as under full recomputation


@dataclass(frozen=True)
class Setup:
    """A published run.

    Attributes:
        name: model, length and what the row is of.
        cluster: what it ran on.
        overrides: of the default config, as on the command line.
        notes: keys of NOTES: source and assumptions.
        published: throughput of a GPU, in TFLOP/s counted as `counted` says, or without it in tokens/s; 0: none.
        fits: whether it ran.
        misses: the planner is known to say the opposite of `fits`; a note says why.
        calibrates: the cluster's rates are taken from this row, so its ratio says nothing.
        published_memory_bytes: peak of a GPU; 0: not told.
    """

    name: str
    cluster: Cluster
    overrides: tuple[str, ...]
    notes: str
    published: float = 0.0
    counted: str = ""
    fits: bool = True
    misses: bool = False
    calibrates: bool = False
    published_memory_bytes: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """A setup and the planner's estimate of it."""

    setup: Setup
    estimate: Estimate

    @property
    def throughput(self) -> float:
        """Of a GPU, in the unit of the setup's own."""
        ranks = self.setup.cluster.ranks
        if not self.setup.counted:
            return self.estimate.tokens_per_second / ranks
        again = 4 / 3 if self.setup.counted == RECOMPUTED else 1.0
        flops = (
            self.estimate.linear_flops + 2 * self.estimate.attention_flops
        ) * again  # all pairs, not the causal half
        return flops / self.estimate.step_seconds / ranks / TERA

    @property
    def ratio(self) -> float:
        """Planner's throughput over the published; 0 where none was published."""
        return self.throughput / self.setup.published if self.setup.published else 0.0


NOTES = {
    "a": (
        "Llama 3 (arXiv 2407.21783), table 4, from a copy on glennklockwood.com/garden/llama-3.1 (TP 8, PP 16, "
        "16M tokens a batch; CP 16 at 128K). From memory, not looked up: its MFU is PaLM's, which counts every "
        "pair of the sequence; at 8K it recomputed nothing. Assumed: interleaved 1F1B with 4 stages a rank, "
        "weights kept gathered, keys and values by all-gather, FlashAttention-2, H100 SXM at the planner's own "
        "shares. Our code keeps the gathered outputs of norms on every tensor-parallel rank, and so must recompute "
        'products: `activation.checkpoint = "attention_saved"`.'
    ),
    "b": (
        "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 2, looked up: H100 of 96 GB with "
        "2.4 TB/s at 500 W, compiled; the lengths of table 2 with full recomputation and float8 products. "
        "Assumed: torch sees 95 GiB of the 96 GB; logits of a whole sequence at once; ring. Rates are those of "
        "the planner's H100 times 0.66, which fits the 8K run in bf16; products in float8 are 1.5 times as fast, "
        "which fits the 8K run in float8. Their selective recomputation repeats every second product, ours none; "
        "the factor absorbs this."
    ),
    "c": (
        "ALST (arXiv 2506.13996): lengths from its abstract and from the recipes in ArcticTraining's folder "
        "projects/sequence-parallelism (run-h100-sp1, -sp8 and -sp32-llama-8b.yml), looked up; TFLOP/s from "
        "memory, not looked up. They count every pair, and the forward twice: counted that way, lengths, times "
        "and TFLOP/s agree within 2 %. Ours: full recomputation with `activation.offload`, `mlp_tiles = 128`, the "
        "loss in chunks, AdamW's moments in host memory (`optimizer.offload_state`), fp32 weights and gradients "
        "sharded over the devices, FlashAttention-2 at the planner's own shares. Twice the longest published "
        "length stands for what does not fit."
    ),
    "d": (
        "On one device: weights, gradients and moments are in host memory (`parallel.fsdp_cpu_offload`), as in ALST, "
        "and it has a whole node's."
    ),
    "e": (
        "Plain Hugging Face with ZeRO-3: logits of the whole sequence, no tiles, activations on the device. A "
        "recipe has 32K on 8 GPUs; the abstract says that longer sequences run out of memory."
    ),
    "f": (
        "Recipes on the way to (c), at their longest: without offload, and without tiles. The planner is wrong "
        "about two of them. They use Liger's fused SwiGLU, where the formula assumes six wide tensors of an MLP "
        "at a time."
    ),
}

H100 = ACCELERATORS["h100-80g"]
SLOWED, FLOAT8 = 0.662, 1.5  # see note b
AT_500_WATT = replace(
    H100,
    memory_bytes=95 * GIB,
    memory_bandwidth=2.4e12,
    linear=H100.linear * SLOWED,
    attention_forward=H100.attention_forward * SLOWED,
    attention_backward=H100.attention_backward * SLOWED,
    measured=True,  # of kernel flash, which all setups name
    source="torchtitan's benchmarks of December 2024",
)


def published_table() -> list[str]:
    """Lines of Markdown: a table of all setups, and the notes it refers to."""
    lines = [
        "| setup | GPUs | published, a GPU | planner | ratio | memory, GiB of usable | published; planner | notes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(compare(setup)) for setup in setups()]
    for key, note in NOTES.items():
        lines += ["", *textwrap.wrap(f"({key}) {note}", DOCS_WIDTH, break_long_words=False, break_on_hyphens=False)]
    return lines


def compare(setup: Setup) -> Comparison:
    """Plan a setup; the registry must know `llama`."""
    return Comparison(setup, plan_config(config_of(setup.overrides), setup.cluster)[0])


def setups() -> list[Setup]:
    """All of them, in the table's order."""
    return [*llama3(), *torchtitan(), *alst()]


def llama3() -> list[Setup]:
    """405B at both lengths of the paper's table."""
    runs = ((8192, 1024, 1, 430.0), (8192, 2048, 1, 400.0), (131072, 2048, 16, 380.0))
    return [
        Setup(
            f"Llama 3 405B, {length // 1024}K",
            make_cluster("h100-80g", nodes),
            _overrides(
                "405B", length, 2**24, cp, "--parallel.tp=8", "--parallel.pp=16",
                "--parallel.pp_schedule=interleaved_1f1b", "--parallel.pp_stages_per_rank=4",
                "--activation.checkpoint=attention_saved", "--context_parallel.strategy=all_gather",
            ),
            "a", published, SQUARE,
        )
        for length, nodes, cp, published in runs
    ]  # fmt: skip


def torchtitan() -> list[Setup]:
    """8B on 8 GPUs: two runs of 8K without context parallelism, then the lengths of its table 2."""
    found = []
    for name, factor, published, memory in (("bf16", 1.0, 6667.0, 77.0), ("float8", FLOAT8, 8532.0, 76.8)):
        overrides = _overrides(
            "8B", 8192, 8192 * 16, 1, "--compile.enable=true", "--activation.checkpoint=selective",
            "--training.micro_batch_sequences=2", "--training.loss_chunk_tokens=16384",
        )  # fmt: skip
        setup = Setup(f"torchtitan 8B, 8K, {name}", _node(factor), overrides, "b", published, calibrates=True)
        found.append(replace(setup, published_memory_bytes=memory * GIB))
    runs = ((32768, 1, 3890.0, 83.9), (65536, 2, 2540.0, 84.2), (131072, 4, 1071.0, 84.0), (262144, 8, 548.0, 84.5))
    for length, cp, published, memory in runs:
        overrides = _overrides(
            "8B", length, length * 8 // cp, cp, "--compile.enable=true", "--activation.checkpoint=full",
            f"--training.loss_chunk_tokens={length // cp}", "--context_parallel.strategy=ring",
        )  # fmt: skip
        setup = Setup(f"torchtitan 8B, {length // 1024}K", _node(FLOAT8), overrides, "b", published)
        found.append(replace(setup, published_memory_bytes=memory * GIB))
    return found


def alst() -> list[Setup]:
    """8B on 1, 8 and 32 GPUs: the longest that fit, and twice as long; then on a node with less, and the baseline."""
    one = make_cluster("h100-80g", ranks_per_node=1, host_bytes=HOST_BYTES)
    node, four = make_cluster("h100-80g"), make_cluster("h100-80g", 4)
    long = ("--activation.checkpoint=full", "--activation.offload=true", "--activation.mlp_tiles=128")
    on_host = ("--parallel.fsdp_cpu_offload=true", *long)
    sharded = ("--optimizer.offload_state=true", "--training.reduce_dtype=bfloat16")
    all_to_all_group = "--context_parallel.strategy=all_to_all"
    spread = (*sharded, *long, all_to_all_group)
    plain = (*sharded, "--activation.checkpoint=full")
    found: list[Setup] = []
    settings: tuple[str, ...]
    for name, cluster, length, settings, notes, published in (
        ("500K", one, 500_000, on_host, "c d", 548.1),
        ("3.7M", node, 3_700_000, spread, "c", 590.6),
        ("15M", four, 15_000_000, spread, "c", 590.6),
    ):
        longest = Setup(
            f"ALST 8B, {name}", cluster, _overrides("8B", length, length, cluster.ranks, *settings),
            notes, published, RECOMPUTED,
        )  # fmt: skip
        twice = _overrides("8B", 2 * length, 2 * length, cluster.ranks, *settings)
        found += [longest, Setup(f"ALST 8B, twice {name}", cluster, twice, notes, fits=False)]
    for name, length, cp, settings, misses in (
        ("loss in chunks, 160K", 160_000, 1, plain, True),
        ("and heads traded, 1.1M", 1_100_000, 8, (*plain, all_to_all_group), False),
        ("and offload, 2.4M", 2_400_000, 8, (*plain, all_to_all_group, "--activation.offload=true"), True),
    ):
        overrides = _overrides("8B", length, length * 8 // cp, cp, *settings)
        found.append(Setup(f"ALST 8B, {name}", node, overrides, "c f", misses=misses))
    for length, fits in ((32_000, True), (64_000, False)):
        overrides = _overrides("8B", length, 8 * length, 1, *plain, f"--training.loss_chunk_tokens={length}")
        found.append(Setup(f"ALST's baseline 8B, {length // 1000}K", node, overrides, "c e", fits=fits))
    return found


def _node(float8: float) -> Cluster:
    """torchtitan's node of 8; products run `float8` times as fast as in bf16."""
    accelerator = replace(AT_500_WATT, linear=AT_500_WATT.linear * float8)
    return replace(make_cluster("h100-80g"), name="h100-96g", accelerator=accelerator)


def _overrides(flavor: str, length: int, batch_tokens: int, cp: int, *more: str) -> tuple[str, ...]:
    stage = "--curriculum.stages[0]"
    return (
        f"--model.flavor={flavor}", f"{stage}.seq_len={length}", f"{stage}.global_batch_tokens={batch_tokens}",
        f"{stage}.cp={cp}", "--context_parallel.kernel=flash", "--compile.enable=false", *more,
    )  # fmt: skip


def _row(found: Comparison) -> str:
    setup, estimate = found.setup, found.estimate
    unit = "TFLOP/s" if setup.counted else "tokens/s"
    published = f"{setup.published:,.0f} {unit}" if setup.published else "-"
    planner = f"{found.throughput:,.0f}" if setup.published else "-"
    ratio = f"{found.ratio:.2f}" if setup.published else "-"
    if setup.calibrates:
        ratio += ", set"
    memory = f"{estimate.memory.total / GIB:.0f} of {estimate.cluster.usable_bytes / GIB:.0f}"
    if setup.published_memory_bytes:
        memory += f" ({setup.published_memory_bytes / GIB:.0f})"
    verdict = f"{_fits(setup.fits)}; {_fits(estimate.fits)}{' (wrong)' if setup.misses else ''}"
    cells: Sequence[str] = (
        setup.name, f"{setup.cluster.ranks:,}", published, planner, ratio, memory, verdict, setup.notes,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _fits(yes: bool) -> str:
    return "fits" if yes else "does not"
