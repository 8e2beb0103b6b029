"""Every layout gives one process's losses, gradients and gradient norms; one process gives plain PyTorch's."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models.llama import FLAVORS, Llama
from tests.support.rank_pool import RankPool
from tests.support.runs import first_gradients, losses, packed_gradients, prepared, train_and_first_gradients, write_run
from torchtitan_cp.curriculum import rope_frequencies
from torchtitan_cp.parallel.nf4 import SHARDS_BYTES
from torchtitan_cp.parallel.pipeline_stages import SPLITS_ANY_BACKWARD

FOUR_LAYERS = "model.overrides.n_layers=4"
BIAS, QK_NORM, SINKS = (f"model.overrides.{option}=true" for option in ("qkv_bias", "qk_norm", "sinks"))
EXPERTS = (
    "model.architecture=moe",
    QK_NORM,
    *(f"model.overrides.{size}" for size in ("ffn_dim=40", "n_experts=6", "experts_per_token=2", "balance=0.5")),
)
# DeepSeek-V3's router, and all losses that a router has.
ROUTERS = (
    *("score_function='sigmoid'", "routed_scaling_factor=2.5", "n_groups=3", "groups_per_token=2"),
    *("n_shared_experts=2", "expert_bias=true", "router_z_loss=0.05"),
)
# Scores of a fresh router lie close together. With seed 0 and on some CPUs, ranks that sum in another order choose
# another expert for a token from step 15 on (loads differ by one choice): norms agree to 2e-5 before, to 2e-3 after.
ROUTED = (*EXPERTS, FOUR_LAYERS, "training.seed=1", *(f"model.overrides.{option}" for option in ROUTERS))
HYBRID_MODEL = (
    "model.architecture=qwen3_5",
    FOUR_LAYERS,
    *(f"model.overrides.linear_{size}" for size in ("key_heads=3", "value_heads=6", "key_dim=8", "value_dim=12")),
)
# What is compared with one rank of the same model.
MODELS: dict[str, tuple[str, ...]] = {
    "2 layers": (),
    "4 layers": (FOUR_LAYERS,),
    "4 layers, untied": (FOUR_LAYERS, "model.overrides.tie_embeddings=false"),
    "4 layers, windows": (FOUR_LAYERS, "model.overrides.windows=[20, 0, 50]"),
    "sinks and windows, gpt-oss": (SINKS, "model.overrides.windows=[50, 0]"),
    "every option": (BIAS, QK_NORM, SINKS, "model.overrides.windows=[0, 50]"),
    "experts": EXPERTS,
    "eight experts": (*EXPERTS, "model.overrides.n_experts=8"),
    "shared experts": (*EXPERTS, FOUR_LAYERS, "model.overrides.n_shared_experts=2", "model.overrides.balance=0.0"),
    "routers": ROUTED,
    "Qwen3.5": HYBRID_MODEL,
    # The output is the embedding, by a name that only the last part of a pipeline has.
    "adapters": (FOUR_LAYERS, QK_NORM, "lora.rank=6", "lora.train=['norm', 'output']"),
    # Keys and values have half a group of weights and stay in bf16.
    "adapters on NF4": (
        *(f"model.overrides.{size}" for size in ("dim=128", "head_dim=32", "ffn_dim=128", "n_layers=4")),
        *("lora.rank=6", "lora.base='nf4'", "lora.train=['norm']"),
    ),
    "adapters on NF4, experts": (
        *(*EXPERTS, "model.overrides.dim=128", "model.overrides.head_dim=32", "lora.rank=6", "lora.base='nf4'"),
        "lora.train=['router']",
    ),
    "adapters, experts": (*EXPERTS, "lora.rank=6", "lora.train=['router', 'norm']"),
}


@dataclass(frozen=True)
class Layout:
    """A row of the table.

    Attributes:
        ranks: size of the world.
        degrees: keys of [parallel].
        others: further keys, of the layout alone.
        model: key of MODELS.
        deep: in the deep suite; else in the default suite.
        steps: of the run; in ten, weights could drift apart, and with them which expert gets a token.
    """

    ranks: int
    degrees: str = ""
    others: str = ""
    model: str = "2 layers"
    deep: bool = True
    steps: int = 4

    @property
    def overrides(self) -> list[str]:
        keys = [f"parallel.{degree}" for degree in self.degrees.split()] + self.others.split()
        return [f"--{key}" for key in keys]

    @property
    def sequences(self) -> int:
        """Of a step: two micro-batches; four where pipelines, data-parallel ranks or a micro-batch need more."""
        degrees = dict(degree.split("=") for degree in self.degrees.split())
        alone = self.ranks == int(degrees.get("cp", 1)) * int(degrees.get("tp", 1))
        return 2 if alone and TWO_AT_ONCE not in self.others else 4


ATTENTION_SAVED = "activation.checkpoint=attention_saved"
COMPILED = "compile.enable=true"
FULL = "activation.checkpoint=full"
SELECTIVE = "activation.checkpoint=selective"
TILES = "activation.mlp_tiles="
TWO_AT_ONCE = "training.micro_batch_sequences=2"
LAYOUT, STRATEGY = "context_parallel.layout=", "context_parallel.strategy="
HYBRID = f"{STRATEGY}hybrid context_parallel.all_to_all_ranks=2"

LAYOUTS = {
    # The default suite: every degree, strategy, order of chunks, way of recomputing and option of a model.
    # Compiled blocks: tests/ranks/parallel/test_apply.py and tests/ranks/attention/test_compile.py.
    "FSDP 2 x CP 2, zigzag ring, recomputed": Layout(4, "cp=2", f"{LAYOUT}zigzag {FULL}", deep=False),
    "HSDP 2 x CP 2, contiguous all-gather, MLP in 3 tiles, two sequences at once, every option": Layout(
        4,
        "dp_replicate=2 cp=2",
        f"{STRATEGY}all_gather {LAYOUT}contiguous {TILES}3 {TWO_AT_ONCE}",
        "every option",
        deep=False,
    ),
    "CP 2 x TP 2, all-to-all, attention saved, every option": Layout(
        4, "cp=2 tp=2", f"{STRATEGY}all_to_all {ATTENTION_SAVED}", "every option", deep=False
    ),
    "CP 4, EP 2, balanced hybrid, selective, experts": Layout(
        4, "cp=4 ep=2", f"{HYBRID} {LAYOUT}balanced {SELECTIVE}", "experts", deep=False
    ),
    "PP 2 x TP 2, routers": Layout(4, "pp=2 tp=2", "", "routers"),
    "PP 2 x TP 2, 1F1B, untied": Layout(4, "pp=2 tp=2", "", "4 layers, untied", deep=False),
    "PP 2 x FSDP 2, interleaved": Layout(4, "pp=2 pp_schedule=interleaved_1f1b", "", "4 layers", deep=False),
    # FSDP, HSDP, CP and TP, where no row above or below holds the same with more beside it.
    "CP 2": Layout(2, "cp=2", steps=10),
    "CP 2, contiguous": Layout(2, "cp=2", f"{LAYOUT}contiguous"),
    "CP 4, hybrid, documents": Layout(4, "cp=4", f"{HYBRID} {LAYOUT}documents"),
    "CP 4, all-to-all": Layout(4, "cp=4", f"{STRATEGY}all_to_all"),
    "CP 2, MLP in 3 tiles, recomputed": Layout(2, "cp=2", f"{FULL} {TILES}3"),
    "HSDP 2 x FSDP 2": Layout(4, "dp_replicate=2"),
    "HSDP 2 x CP 2 x TP 2, MLP in 2 tiles": Layout(8, "dp_replicate=2 cp=2 tp=2", f"{TILES}2"),
    "FSDP 2, two sequences at once": Layout(2, "", TWO_AT_ONCE),
    # With pipelines, on four layers.
    "PP 4, 1F1B": Layout(4, "pp=4", "", "4 layers"),
    "PP 2, recomputed": Layout(2, "pp=2", FULL, "4 layers"),
    "PP 2 x HSDP 2": Layout(4, "pp=2 dp_replicate=2", "", "4 layers"),
    "PP 2 x CP 2, all-gather, interleaved": Layout(
        4, "pp=2 cp=2 pp_schedule=interleaved_1f1b", f"{STRATEGY}all_gather", "4 layers"
    ),
    "PP 2 x CP 2, all-to-all": Layout(4, "pp=2 cp=2", f"{STRATEGY}all_to_all", "4 layers"),
    "PP 2 x CP 4, hybrid, recomputed": Layout(8, "pp=2 cp=4", f"{HYBRID} {FULL}", "4 layers"),
    "PP 2 x FSDP 2 x TP 2, ZBV, MLP in 2 tiles": Layout(
        8, "pp=2 tp=2 pp_schedule=zbv_zero_bubble", f"{TILES}2", "4 layers"
    ),
    "PP 2 x FSDP 2 x CP 2, selective": Layout(8, "pp=2 cp=2", SELECTIVE, "4 layers"),
    "PP 2 x CP 2, layers with windows": Layout(4, "pp=2 cp=2", "", "4 layers, windows"),
    "CP 4, hybrid, selective, compiled, sinks and windows": Layout(
        4, "cp=4", f"{HYBRID} {SELECTIVE} {COMPILED}", "sinks and windows, gpt-oss"
    ),
    # The options that attention treats in its own way, in the ring; all of them at once on three other layouts.
    "CP 2, sinks and windows, gpt-oss": Layout(2, "cp=2", "", "sinks and windows, gpt-oss"),
    "PP 2 x TP 2, compiled, attention saved, every option": Layout(
        4, "pp=2 tp=2", f"{COMPILED} {ATTENTION_SAVED}", "every option"
    ),
    # States cross ranks; by default those of packed documents, below.
    "FSDP 2 x CP 2, documents, Qwen3.5": Layout(4, "cp=2", f"{LAYOUT}documents", "Qwen3.5"),
    "CP 2, compiled, Qwen3.5": Layout(2, "cp=2", COMPILED, "Qwen3.5"),
    "CP 4, balanced, recomputed, two sequences at once, Qwen3.5": Layout(
        4, "cp=4", f"{LAYOUT}balanced {FULL} {TWO_AT_ONCE}", "Qwen3.5"
    ),
    "CP 4, hybrid, two sequences at once, Qwen3.5": Layout(
        4, "cp=4", f"{HYBRID} {LAYOUT}zigzag {TWO_AT_ONCE}", "Qwen3.5"
    ),
    "PP 2 x CP 2, attention saved, Qwen3.5": Layout(4, "pp=2 cp=2", ATTENTION_SAVED, "Qwen3.5"),
    # Experts: their balance loss is in the gradient exactly once.
    "FSDP 2, two sequences at once, no accumulation, experts": Layout(2, "", TWO_AT_ONCE, "experts"),
    "HSDP 2 x CP 2, EP 2, all-to-all, MLP in 3 tiles, experts": Layout(
        4, "dp_replicate=2 cp=2 ep=2", f"{STRATEGY}all_to_all {TILES}3", "experts"
    ),
    "FSDP 2, EP 2, two sequences at once, experts": Layout(2, "ep=2", TWO_AT_ONCE, "experts", steps=10),
    "FSDP 4, EP 4, attention saved, experts": Layout(4, "ep=4", ATTENTION_SAVED, "eight experts"),
    "CP 2, EP 2, recomputed, experts": Layout(2, "cp=2 ep=2", FULL, "experts", steps=10),
    "FSDP 2 x CP 2, EP 4, MLP in 3 tiles, experts": Layout(4, "cp=2 ep=4", f"{TILES}3", "eight experts"),
    # Compiled in parts, and by default in tests/ranks/models/test_moe.py.
    "CP 2, EP 2, compiled, attention saved, experts": Layout(
        2, "cp=2 ep=2", f"{COMPILED} {ATTENTION_SAVED}", "experts"
    ),
    "FSDP 2 x CP 2, EP 2, compiled, recomputed, MLP in 3 tiles, experts": Layout(
        4, "cp=2 ep=2", f"{COMPILED} {FULL} {TILES}3", "experts"
    ),
    "FSDP 2, compiled, experts": Layout(2, "", COMPILED, "experts"),
    "TP 2 x CP 2, EP 2, compiled, selective, routers": Layout(
        4, "tp=2 cp=2 ep=2", f"{COMPILED} {SELECTIVE}", "routers"
    ),
    "PP 2 x CP 2, EP 2, compiled, routers": Layout(4, "pp=2 cp=2 ep=2", COMPILED, "routers"),
    # Their routers' losses under pipelines, and tensor parallelism beside them.
    "TP 2 x CP 2, EP 2, MLP in 3 tiles, two sequences at once, routers": Layout(
        4, "tp=2 cp=2 ep=2", f"{TILES}3 {TWO_AT_ONCE}", "routers"
    ),
    "TP 2 x CP 2, attention saved, shared experts": Layout(4, "tp=2 cp=2", ATTENTION_SAVED, "shared experts"),
    "PP 2, interleaved zero bubble, routers": Layout(2, "pp=2 pp_schedule=interleaved_zero_bubble", "", "routers"),
    "PP 2 x CP 2, EP 2, interleaved, routers": Layout(4, "pp=2 cp=2 ep=2 pp_schedule=interleaved_1f1b", "", "routers"),
    "PP 2 x CP 2 x TP 2, EP 2, recomputed, routers": Layout(8, "pp=2 cp=2 tp=2 ep=2", FULL, "routers"),
    # Adapters of low rank beside frozen weights.
    "FSDP 2, adapters": Layout(2, "", "", "adapters"),
    "CP 2, compiled, adapters": Layout(2, "cp=2", COMPILED, "adapters"),
    "TP 2, adapters": Layout(2, "tp=2", "", "adapters"),
    "PP 2, adapters": Layout(2, "pp=2", "", "adapters"),
    "PP 2 x TP 2, adapters": Layout(4, "pp=2 tp=2", "", "adapters", deep=False),
    "FSDP 2 x CP 2, recomputed, adapters": Layout(4, "cp=2", FULL, "adapters", deep=False),
    "FSDP 2 x CP 2, recomputed, adapters on NF4": Layout(4, "cp=2", FULL, "adapters on NF4", deep=False),
    "CP 2, compiled, selective, adapters on NF4": Layout(2, "cp=2", f"{COMPILED} {SELECTIVE}", "adapters on NF4"),
    "PP 2 x HSDP 2, MLP in 3 tiles, adapters on NF4": Layout(4, "pp=2 dp_replicate=2", f"{TILES}3", "adapters on NF4"),
    "CP 2, EP 2, adapters on NF4, experts": Layout(2, "cp=2 ep=2", "", "adapters on NF4, experts"),
    "TP 2, compiled, attention saved, adapters": Layout(2, "tp=2", f"{COMPILED} {ATTENTION_SAVED}", "adapters"),
    "CP 2 x TP 2, EP 2, adapters, experts": Layout(4, "cp=2 tp=2 ep=2", "", "adapters, experts"),
}

# [layout] with several documents in a sequence, and other numbers of tokens that count in each.
PACKED = {
    "FSDP 2 x CP 2 x TP 2, balanced": Layout(8, "cp=2 tp=2", f"{LAYOUT}balanced", "4 layers"),
    "one rank, four sequences at once": Layout(1, "pp=1", "training.micro_batch_sequences=4", "4 layers", deep=False),
    "FSDP 2, two sequences at once, no accumulation": Layout(2, "dp_shard=2", TWO_AT_ONCE, "4 layers"),
    "CP 2, recomputed": Layout(2, "cp=2", FULL, "4 layers", deep=False),
    "CP 4, all-gather, windows": Layout(4, "cp=4", f"{STRATEGY}all_gather", "4 layers, windows", deep=False),
    "CP 2 x TP 2, all-to-all": Layout(4, "cp=2 tp=2", f"{STRATEGY}all_to_all", "4 layers"),
    "PP 2 x CP 2, balanced": Layout(4, "pp=2 cp=2", f"{LAYOUT}balanced", "4 layers", deep=False),
    "CP 4, documents, selective, Qwen3.5": Layout(4, "cp=4", f"{LAYOUT}documents {SELECTIVE}", "Qwen3.5", deep=False),
}


def parameters(layouts: dict[str, Layout]) -> list[Any]:
    return [
        pytest.param(layout, id=name, marks=[pytest.mark.deep] if layout.deep else [])
        for name, layout in layouts.items()
    ]


Lines = list[dict[str, Any]]
Gradients = tuple[float, dict[str, Tensor]]
References = Callable[[str, int, int], tuple[Lines, dict[str, Tensor]]]


def model_overrides(model: str) -> list[str]:
    return [f"--{key}" for key in MODELS[model]]


def length_overrides(steps: int, sequences: int) -> list[str]:
    stage = "--curriculum.stages[0]"
    return [f"{stage}.steps={steps}", f"{stage}.global_batch_tokens={128 * sequences}"]


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def references(ranks: Callable[[int], RankPool], run_toml: Path) -> References:
    """`references(model, steps, sequences)`: the lines and first gradients of one rank."""
    folders = itertools.count()

    @functools.cache
    def reference(model: str, steps: int, sequences: int) -> tuple[Lines, dict[str, Tensor]]:
        folder = f"--job.dump_folder={run_toml.parent}/one-{next(folders)}"
        overrides = [*model_overrides(model), *length_overrides(steps, sequences), folder]
        return ranks(1)(train_and_first_gradients, run_toml, *overrides)[0]

    return reference


@pytest.fixture(scope="module")
def packed_reference(ranks: Callable[[int], RankPool], run_toml: Path) -> Callable[[str], Gradients]:
    """`packed_reference(model)`: the loss and gradients of one rank on packed documents."""
    return functools.cache(lambda model: ranks(1)(packed_gradients, run_toml, *model_overrides(model))[0])


def norm_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def largest_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("layout", parameters(LAYOUTS))
def test_a_layout_gives_the_losses_gradients_and_norms_of_one_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, references: References, tmp_path: Path, layout: Layout
) -> None:
    if "zero" in layout.degrees and not SPLITS_ANY_BACKWARD:
        pytest.skip("zero-bubble schedules need torch 2.13")
    if "NF4" in layout.model and not SHARDS_BYTES:
        pytest.skip("FSDP shards bytes from torch 2.13 on")
    steps = layout.steps
    want_lines, want = references(layout.model, steps, layout.sequences)
    overrides = [*model_overrides(layout.model), *layout.overrides, *length_overrides(steps, layout.sequences)]
    lines, gradients = ranks(layout.ranks)(
        train_and_first_gradients, run_toml, f"--job.dump_folder={tmp_path}/run", *overrides
    )[0]
    assert len(lines) == steps
    assert lines[0]["loss"] == pytest.approx(want_lines[0]["loss"], rel=1e-5)
    assert gradients.keys() == want.keys()
    for name, gradient in gradients.items():
        assert want[name].norm() > 0, name
        assert norm_error(gradient, want[name]) < 1e-5, name
        assert largest_error(gradient, want[name]) < 1e-5, name
    assert losses(lines) == pytest.approx(losses(want_lines), rel=1e-4)
    for got, wanted in zip(lines, want_lines, strict=True):
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)
        assert (0 < got["pipeline_idle"] < 1) if "pp=" in layout.degrees else got["pipeline_idle"] is None


def count_all_reduces(path: Path, *overrides: str) -> tuple[int, dict[str, Tensor]]:
    """On a rank: all-reduces of a step, and the gradients that it leaves."""
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        _, gradients = first_gradients(path, *overrides)
    return all_reduce.call_count, gradients


@pytest.mark.parametrize(("dtype", "more"), [("float32", False), ("bfloat16", True)])
def test_replicas_sum_gradients_once_a_step_where_the_sum_over_micro_batches_stays_exact(
    ranks: Callable[[int], RankPool], run_toml: Path, references: References, dtype: str, more: bool
) -> None:
    keys = ["--parallel.dp_replicate=2", "--parallel.dp_shard=2", f"--training.reduce_dtype={dtype}"]
    (one, _), (two, gradients) = (
        ranks(4)(count_all_reduces, run_toml, *keys, *length_overrides(4, sequences))[0] for sequences in (4, 8)
    )
    assert (two > one) is more, (one, two)
    _, want = references("2 layers", 4, 8)
    for name, gradient in gradients.items():
        assert norm_error(gradient, want[name]) < (1e-2 if more else 1e-5), name


@pytest.mark.parametrize("layout", parameters(PACKED))
def test_packed_documents_with_unequal_counts_of_tokens_give_the_gradients_of_one_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, packed_reference: Callable[[str], Gradients], layout: Layout
) -> None:
    model = model_overrides(layout.model)
    want_loss, want = packed_reference(layout.model)
    loss, gradients = ranks(layout.ranks)(packed_gradients, run_toml, *model, *layout.overrides)[0]
    assert loss == pytest.approx(want_loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert largest_error(gradient, want[name]) < 1e-5, name


def plain_first_gradients(path: Path) -> tuple[float, dict[str, Tensor]]:
    """The first step in fp64 with nothing of ours but the model's formulas: SDPA and full logits."""
    trainer = prepared(path)
    shape = dataclasses.replace(FLAVORS["debug"], **trainer.config.model.overrides, vocab_size=257)

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: object, window: int) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)

    model = Llama(shape, attend).double()
    with torch.no_grad():
        for (_, ours), theirs in zip(trainer.model.parts[0].named_parameters(), model.parameters(), strict=True):
            theirs.copy_(ours.full_tensor())  # type: ignore[attr-defined]
    model.set_rope(
        *rope_frequencies(trainer.stages[0].rope, shape.head_dim, trainer.stages[0].seq_len), torch.device("cpu")
    )
    trainer.enter_stage(trainer.stages[0])
    rows = [trainer.data_pipeline.samples.sequence(number) for number in range(4)]
    tokens, labels = (
        torch.stack([torch.from_numpy(part) for part in parts])
        for parts in zip(*((r.tokens, r.labels) for r in rows), strict=True)
    )
    loss = F.cross_entropy(model(tokens, torch.arange(128), None).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_one_rank_gives_the_loss_and_gradients_of_plain_pytorch_in_fp64(
    ranks: Callable[[int], RankPool], run_toml: Path, references: References
) -> None:
    lines, got = references("2 layers", 3, 4)
    loss, gradients = ranks(1)(plain_first_gradients, run_toml)[0]
    assert lines[0]["loss"] == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        assert norm_error(got[name].double(), gradient) < 1e-5, name


def test_bf16_on_ranks_stays_close_to_fp32(
    ranks: Callable[[int], RankPool], run_toml: Path, references: References
) -> None:
    lines, want = references("2 layers", 3, 4)
    overrides = ["--parallel.cp=2", "--training.compute_dtype=bfloat16"]
    loss, gradients = ranks(2)(first_gradients, run_toml, *overrides)[0]
    assert loss == pytest.approx(lines[0]["loss"], rel=2e-3)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32, "gradients are reduced and kept in fp32"
        # bf16 rounds at 2^-9; a gradient passes some ten roundings on its way through two layers.
        assert norm_error(gradient, want[name]) < 10 * 2**-8, name
