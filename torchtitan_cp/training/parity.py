"""Parity of a config: a short first step with parallelism beside the same step on one rank.

The one rank runs the plain model without sharding, with torch's scaled_dot_product_attention: another implementation,
not ours on fewer ranks.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from torchtitan_cp.attention import make_plan
from torchtitan_cp.attention.doctor import by_layer, difference
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.contract import Attend, LanguageModel
from torchtitan_cp.config.degrees import length_unit
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.config.run_folder import prepare_run_folder
from torchtitan_cp.curriculum import ResolvedStage
from torchtitan_cp.data.batches.micro_batches import BatchLayout, assign_sequences, collate, read_step
from torchtitan_cp.runtime.device import Device, World
from torchtitan_cp.training import registry
from torchtitan_cp.training.model import LayerAttention, ParallelModel, cast_parameters, set_rope
from torchtitan_cp.training.plain_attention import PlainAttention
from torchtitan_cp.training.resolve import without_lossy_options
from torchtitan_cp.training.trainer import Trainer

logger = logging.getLogger(__name__)

SHORT_TOKENS = 512
FP32_TOLERANCE = 1e-5
# A bf16 run is compared with fp32. It may differ 1.5 times as much as the plain model in bf16 does.
BF16_ALLOWANCE = 1.5
BF16_FLOOR = 1e-3
PAIR_BYTES = 15  # of plain attention's masks, for each query and key; measured


@dataclass(frozen=True)
class Row:
    """One compared quantity.

    Attributes:
        quantity: the loss, or the attention output or gradients of a part of the model.
        difference: relative L2 difference from one rank in fp32.
        largest: the largest difference over the largest value.
        allowed: the largest `difference` that still counts as parity.
    """

    quantity: str
    difference: float
    largest: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """A stage of the curriculum compared with one rank. Peaks are the memory that the step adds to what was held."""

    model: str
    layout: str
    seq_len: int
    rows: tuple[Row, ...]
    parallel_peak_bytes: int
    single_peak_bytes: int
    holds: bool


# Results of a forward and backward by name, in this order: the loss, the attention outputs, and each layer's gradients
# as one vector. All are unsharded fp32 tensors on the host.
Values = dict[str, Tensor]


def verify_parity(config: Config, world: World, length: int) -> bool:
    """Compare every kind of stage of the curriculum with one rank, print the tables, write parity.json.

    Args:
        length: tokens of a sequence; 0: the smallest of at least 512 that the layout can split.

    Returns:
        whether parity holds everywhere.

    Raises:
        ConfigError: the unsharded model does not fit on one rank.
    """
    config = without_lossy_options(config)
    trainer = Trainer(config, world, trains=False)
    first_of_kind = {_kind(stage): stage for stage in reversed(trainer.stages)}
    comparisons = []
    for stage in sorted(first_of_kind.values(), key=lambda stage: stage.index):
        if (stage.tp, stage.pp) != (trainer.meshes.degrees.tp, trainer.meshes.degrees.pp):
            trainer = Trainer(config, world, stage_index=stage.index, trains=False)
        check_fits(trainer, length)
        comparisons.append(_compare(trainer, shorten(trainer, stage, length)))
    if world.rank == 0:
        _print(comparisons, config.training.compute_dtype, world.size)
        prepare_run_folder(config.job.dump_folder)
        text = json.dumps([asdict(comparison) for comparison in comparisons], indent=1)
        (Path(config.job.dump_folder) / "parity.json").write_text(text)
    return all(comparison.holds for comparison in comparisons)


def _kind(stage: ResolvedStage) -> tuple[Any, ...]:
    """What a short step of the stage depends on."""
    layout = stage.tp, stage.pp, stage.cp, stage.strategy, stage.all_to_all_ranks
    return *layout, stage.data.document_mask, stage.data.restart_positions, stage.rope


def shorten(trainer: Trainer, stage: ResolvedStage, length: int, default: int = SHORT_TOKENS) -> ResolvedStage:
    """The stage at a short length, with one micro-batch, or one for each pipeline rank.

    Args:
        length: of its sequences; 0: at least `default`, and what the layout can split.

    Raises:
        ConfigError: the ranks cannot share so many tokens, or the model has no positions for them.
    """
    divisor = length_unit(stage.cp, stage.tp)
    if length % divisor:
        raise ConfigError(
            f"the length {length} cannot be shared by cp = {stage.cp} and tp = {stage.tp}",
            fix=f"give a multiple of {divisor}",
        )
    registry.check_length(trainer.model.args, "the length", length)
    unit = stage.cp * stage.tp * (8 if trainer.config.context_parallel.layout == "balanced" else 2)
    seq_len = length or min(-(-default // unit) * unit, stage.seq_len)
    micro_batches = trainer.meshes.pp.size()
    tokens = seq_len * stage.dp * stage.micro_batch_sequences * micro_batches
    return replace(stage, seq_len=seq_len, micro_batches=micro_batches, global_batch_tokens=tokens)


def _compare(trainer: Trainer, stage: ResolvedStage) -> Comparison:
    """Run a stage's first step both ways. Collective."""
    pipeline = f" x pp {stage.pp}" * (stage.pp > 1)
    tensor = f" x tp {stage.tp}" * (stage.tp > 1)
    name = f"{stage.name}: cp {stage.cp} x dp {stage.dp}{tensor}{pipeline}, {stage.strategies[0]}"
    logger.info("parity: %s at %d tokens, %d sequences", name, stage.seq_len, stage.dp * stage.micro_batch_sequences)
    batch_layout = trainer.enter_stage(stage)
    parallel, parallel_peak = _parallel_step(trainer, batch_layout)
    weights = gather(trainer, lambda p: p)
    comparison: list[Any] = [None]
    if trainer.world.rank == 0:
        dtype = trainer.model.compute_dtype
        exact, single_peak = _single_step(trainer, stage, batch_layout, weights, torch.float32)
        rounded = exact
        if dtype != torch.float32:
            rounded, single_peak = _single_step(trainer, stage, batch_layout, weights, dtype)
        rows = tuple(_rows(parallel, exact, rounded, dtype))
        holds = all(row.holds for row in rows)
        peaks = parallel_peak, single_peak
        comparison = [Comparison(_describe_model(trainer.model), name, stage.seq_len, rows, *peaks, holds)]
    dist.broadcast_object_list(comparison)
    return comparison[0]


def _describe_model(model: ParallelModel) -> str:
    """Where the sizes come from, and how many layers and parameters there are."""
    config = model.config.model
    source = config.hub_checkpoint or config.config or config.flavor
    overrides = ", ".join(f"{name} = {value}" for name, value in config.overrides.items())
    sizes = f"{config.architecture} {source}" + f" with {overrides}" * bool(overrides)
    return f"{sizes}: {model.args.n_layers} layers, {model.parameter_count:,} parameters, fresh weights"


def measure_peak(device: Device) -> Callable[[], int]:
    """Start measuring memory. The returned function gives the peak since then beyond what was held before, in bytes."""
    device.reset_peak_memory()
    before = device.peak_memory_bytes()
    return lambda: device.peak_memory_bytes() - before


def _parallel_step(trainer: Trainer, batch_layout: BatchLayout) -> tuple[Values, int]:
    """The step with parallelism: its results, gathered, and the largest peak of memory of any rank. Collective."""
    batches = read_step(trainer.data_pipeline.samples, batch_layout, 0)
    peak_bytes = measure_peak(trainer.device)
    with _record_attention(trainer.model.parts) as outputs:
        report = trainer.forward_backward(batches)
    peak = torch.tensor(peak_bytes(), device=trainer.device.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    attention = {name: batches[0].plan.unshard(_all_heads(out, trainer)).float().cpu() for name, out in outputs.items()}
    gradients = gather(trainer, lambda p: p.grad)
    trainer.model.zero_grad()
    return _values(report.loss, _gather_pipeline(trainer, attention), gradients), int(peak)


def _single_step(
    trainer: Trainer, stage: ResolvedStage, batch_layout: BatchLayout, weights: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Values, int]:
    """The same step on this rank by itself, with the plain model and full logits in fp32: results and peak memory."""
    attention = PlainAttention()
    model = single_model(trainer, stage, weights, attention, dtype)
    peak_bytes = measure_peak(trainer.device)
    with _record_attention([model]) as outputs:
        loss = single_loss(trainer, batch_layout, model, attention)
    peak = peak_bytes()
    first = {name: out[: stage.micro_batch_sequences].float().cpu() for name, out in outputs.items()}
    return _values(loss, first, gradients_of(model)), peak


def single_model(
    trainer: Trainer,
    stage: ResolvedStage,
    weights: dict[str, Tensor],
    attention: Attend,
    dtype: torch.dtype,
) -> LanguageModel:
    """The whole model on this rank, with these weights and this attention."""
    args, device = trainer.model.args, trainer.device.device
    model = registry.architecture(trainer.config.model).build(args, attention)
    model.load_state_dict(weights, strict=False)
    cast_parameters(model.to(device), dtype)
    set_rope(model, args, stage.rope, stage.seq_len, device)
    return model


def single_loss(
    trainer: Trainer,
    batch_layout: BatchLayout,
    model: nn.Module,
    attention: LayerAttention | PlainAttention,
    plans: Any = None,
) -> float:
    """The loss of a step's whole sequences, from full logits in fp32; backward runs where gradients are enabled.

    Args:
        attention: of the model.
        plans: passed to it; None: the number of each token's document, as PlainAttention expects.
    """
    batch = all_sequences(trainer, batch_layout)
    tokens, labels, weights, positions, documents = map(trainer.device.move, batch)
    divisor = weights.double().sum() or 1.0
    if trainer.config.training.loss_normalization == "batch_tokens":
        divisor = labels.numel()
    attention.step_tokens = torch.tensor(labels.numel(), device=labels.device)

    def head(hidden: Tensor, output: nn.Linear) -> Tensor:
        logits = output(hidden).float().flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
        squares = logits.logsumexp(-1).square()
        return torch.stack([(x * weights.flatten()).sum() for x in (losses, squares)])

    loss, z_loss = model(tokens, positions, plans or documents, head) / divisor
    if torch.is_grad_enabled():
        (loss + trainer.config.training.z_loss * z_loss).backward()
    return loss.item()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name, fp32 on the host."""
    return {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


def all_sequences(trainer: Trainer, batch_layout: BatchLayout) -> tuple[Tensor, ...]:
    """Unsharded sequences of the step, beginning with data-parallel rank 0's first micro-batch.

    Returns:
        tokens, labels, weights (fp32) of the losses, positions, and the number of each token's document, all
        `[sequences, S]`, int64 but for the weights.
    """
    samples, normalization = trainer.data_pipeline.samples, trainer.config.training.loss_normalization
    numbers = assign_sequences(samples, 0, batch_layout).flatten().tolist()
    unsharded = replace(
        batch_layout, make_plan=make_plan, strategies={0: "ring"}, weighted=normalization == "conversation"
    )
    batch = collate(samples.sequence, unsharded, numbers)
    documents = [torch.repeat_interleave(torch.tensor(samples.document_lengths(number))) for number in numbers]
    weights = (batch.labels != IGNORED).float() if batch.weights is None else batch.weights
    return batch.tokens, batch.labels, weights, batch.positions.expand_as(batch.tokens), torch.stack(documents)


@contextmanager
def _record_attention(parts: Iterable[nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Record the attention outputs of the next forward by module name, `[B, S/cp, Hq, D]`."""
    outputs: dict[str, Tensor] = {}

    def record(name: str, attend: Any, *arguments: Any, **options: Any) -> Tensor:
        out: Tensor = attend(*arguments, **options)
        outputs.setdefault(name, out.detach())
        return out

    with ExitStack() as stack:
        for part in parts:
            for name, module in part.named_modules():
                if hasattr(module, "attend"):
                    stack.enter_context(patch.object(module, "attend", partial(record, name, module.attend)))
        yield outputs


def gather(trainer: Trainer, get: Callable[[Any], Any]) -> dict[str, Tensor]:
    """`get` of each parameter and buffer, gathered from all ranks, fp32 on the host. Collective."""
    parts = trainer.model.parts
    local = {name: get(x) for part in parts for name, x in (*part.named_parameters(), *part.named_buffers())}
    # NCCL gathers tensors on the GPU only, and offloaded ones are on the host.
    on_device = {name: x.to(trainer.device.device) for name, x in local.items() if x is not None}
    full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in on_device.items()}
    return _gather_pipeline(trainer, {name: x.detach().float().cpu() for name, x in full.items()})


def _gather_pipeline(trainer: Trainer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name from all pipeline ranks. Collective."""
    if trainer.model.pipeline is None:
        return tensors
    by_rank: list[Any] = [None] * trainer.model.pipeline.ranks
    dist.all_gather_object(by_rank, tensors, group=trainer.model.pipeline.group)
    return {name: x for part in by_rank for name, x in part.items()}


def _all_heads(out: Tensor, trainer: Trainer) -> Tensor:
    """An attention output with the heads of all tensor-parallel ranks, `[B, S/cp, Hq, D]`."""
    mesh = trainer.meshes.tp
    return out if mesh is None else DTensor.from_local(out, mesh, [Shard(2)], run_check=False).full_tensor()


def _values(loss: float, attention: dict[str, Tensor], gradients: dict[str, Tensor]) -> Values:
    """The results that are compared, by name."""
    return {
        "loss": torch.tensor(loss),
        **{f"attention output, {name}": out for name, out in attention.items()},
        **{f"gradients, {layer}": vector for layer, vector in by_layer(gradients).items()},
    }


def _rows(parallel: Values, exact: Values, rounded: Values, dtype: torch.dtype) -> Iterator[Row]:
    """The differences, in the order of `exact`.

    Args:
        exact, rounded: one rank's results in fp32 and in the run's dtype.
    """
    min_allowed = FP32_TOLERANCE if dtype == torch.float32 else BF16_FLOOR
    for quantity, value in exact.items():
        expected, found = value.double(), parallel.get(quantity, torch.full_like(value, torch.nan)).double()
        allowed = max(BF16_ALLOWANCE * difference(rounded[quantity].double(), expected), min_allowed)
        largest = ((found - expected).abs().max() / expected.abs().max()).item()
        yield Row(quantity, difference(found, expected), largest, allowed)


def check_fits(trainer: Trainer, length: int = 0) -> None:
    """Refuse a model that does not fit on one rank: unsharded, with gradients and the compared copies.

    Args:
        length: tokens of the sequences that plain attention makes masks for.

    Raises:
        ConfigError: it does not fit.
    """
    copies = 5 if trainer.model.compute_dtype == torch.float32 else 7  # weights, gradients, both gathered, in 2 dtypes
    needed = trainer.model.parameter_count * 4 * copies + PAIR_BYTES * length**2
    free = trainer.device.free_memory_bytes()
    if needed > free:
        layers = "num_hidden_layers" if registry.architecture(trainer.config.model).args_of else "n_layers"
        raise ConfigError(
            f"parity needs the whole model on one rank, with masks of length², {needed / 2**30:,.0f} GiB, and "
            f"{free / 2**30:.0f} GiB are free",
            fix=f"check a slice of it, or fewer tokens: --model.overrides.{layers}=2 --model.load_weights=false",
        )


def _print(comparisons: list[Comparison], dtype: str, ranks: int) -> None:
    console = Console()
    for comparison in comparisons:
        title = f"{comparison.layout}: {ranks} ranks beside one, {comparison.seq_len} tokens, {dtype}"
        title = f"{comparison.model}\n{title}"
        numbers = (Column(header, justify="right") for header in ("relative L2", "largest", "allowed", ""))
        table = Table("compared", *numbers, title=title, title_justify="left")
        for row in comparison.rows:
            verdict = "ok" if row.holds else "APART"
            table.add_row(row.quantity, f"{row.difference:.1e}", f"{row.largest:.1e}", f"{row.allowed:.1e}", verdict)
        console.print(table)
        console.print(
            f"peak memory of the step: {comparison.parallel_peak_bytes / 2**20:,.0f} MiB a rank, "
            f"{comparison.single_peak_bytes / 2**20:,.0f} MiB on one rank (beyond what was held before it)\n"
        )
    broken = [f"{c.layout}: {row.quantity}" for c in comparisons for row in c.rows if not row.holds]
    console.print("parity holds" if not broken else f"PARITY BROKEN, first at {broken[0]} ({len(broken)} in all)")
