"""Parity of a config: a short first step with parallelism beside the same step on one rank, with plain attention."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from torchtitan_cp.attention import Plan
from torchtitan_cp.attention.comparison import Quantity, Row, Trace, compare, describe_peaks, on_rank_0, record_step
from torchtitan_cp.config import Config
from torchtitan_cp.config.run_folder import prepare_run_folder
from torchtitan_cp.curriculum import ResolvedStage
from torchtitan_cp.data.batches.micro_batches import read_step
from torchtitan_cp.runtime.device import World
from torchtitan_cp.training.model import ParallelModel
from torchtitan_cp.training.plain_attention import PlainAttention
from torchtitan_cp.training.resolve import without_lossy_options
from torchtitan_cp.training.short_step import ShortStep, check_fits, comparing_trainer, gather_pipeline, shorten
from torchtitan_cp.training.trainer import Trainer

logger = logging.getLogger(__name__)

SHORT_TOKENS = 512
FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 1e-3  # a bf16 run is compared with fp32, and may also differ as far as the plain model in bf16 does
OUTPUT = "attention output"


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
    trainer = comparing_trainer(config, world)
    first_of_kind = {_kind(stage): stage for stage in reversed(trainer.stages)}
    comparisons = []
    for stage in sorted(first_of_kind.values(), key=lambda stage: stage.index):
        if (stage.tp, stage.pp) != (trainer.meshes.degrees.tp, trainer.meshes.degrees.pp):
            trainer = comparing_trainer(config, world, stage.index)
        check_fits(trainer, length)
        comparisons.append(_compare(trainer, shorten(trainer, stage, length, SHORT_TOKENS)))
    if world.rank == 0:
        _print(comparisons, config.training.compute_dtype, world.size)
        prepare_run_folder(config.job.dump_folder)
        text = json.dumps([asdict(comparison) for comparison in comparisons], indent=1)
        (Path(config.job.dump_folder) / "parity.json").write_text(text)
    return all(comparison.holds for comparison in comparisons)


def _kind(stage: ResolvedStage) -> tuple[object, ...]:
    """What a short step of the stage depends on."""
    layout = stage.tp, stage.pp, stage.cp, stage.strategy, stage.all_to_all_ranks
    return *layout, stage.data.document_mask, stage.data.restart_positions, stage.rope


def _compare(trainer: Trainer, stage: ResolvedStage) -> Comparison:
    """Run a stage's first step both ways. Collective."""
    pipeline = f" x pp {stage.pp}" * (stage.pp > 1)
    tensor = f" x tp {stage.tp}" * (stage.tp > 1)
    name = f"{stage.name}: cp {stage.cp} x dp {stage.dp}{tensor}{pipeline}, {stage.strategies[0]}"
    logger.info("parity: %s at %d tokens, %d sequences", name, stage.seq_len, stage.dp * stage.micro_batch_sequences)
    layout = trainer.enter_stage(stage)
    samples, dtype = trainer.data_pipeline.samples, trainer.model.compute_dtype
    short_step = ShortStep(trainer, stage, layout, lambda _: samples)
    record = partial(_record_attention, sequences=stage.micro_batch_sequences)
    plan = read_step(samples, layout, 0)[0].plan
    ranks = record_step(short_step.on_ranks(), record, partial(_gather_outputs, trainer, plan))

    def compare_with_one() -> Comparison:
        exact = rounded = record_step(short_step.in_one_process(torch.float32, PlainAttention()), record)
        if dtype != torch.float32:
            rounded = record_step(short_step.in_one_process(dtype, PlainAttention()), record)

        tolerance = FP32_TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
        compared = compare(ranks.quantities, exact.quantities, tolerance, rounded.quantities)
        rows = tuple(compared.values())
        holds = all(row.holds for row in rows)
        peaks = ranks.peak_bytes, rounded.peak_bytes
        return Comparison(_describe_model(trainer.model), name, stage.seq_len, rows, *peaks, holds)

    return on_rank_0(compare_with_one)


def _describe_model(model: ParallelModel) -> str:
    """Where the sizes come from, and how many layers and parameters there are."""
    config = model.config.model
    source = config.hub_checkpoint or config.config or config.flavor
    overrides = ", ".join(f"{name} = {value}" for name, value in config.overrides.items())
    sizes = f"{config.architecture} {source}" + f" with {overrides}" * bool(overrides)
    return f"{sizes}: {model.args.n_layers} layers, {model.parameter_count:,} parameters, fresh weights"


@contextmanager
def _record_attention(parts: Sequence[nn.Module], sequences: int) -> Iterator[Trace]:
    """Record the attention outputs of the next forward by module, `[B, S/cp, Hq, D]`, of its first B sequences."""
    trace = Trace()

    def attend(name: str, own: Callable[..., Tensor], *arguments: object, **options: object) -> Tensor:
        out = own(*arguments, **options)
        trace.events.setdefault((name, OUTPUT), out.detach()[:sequences])
        return out

    modules = [(name, module) for part in parts for name, module in part.named_modules() if hasattr(module, "attend")]
    own = [module.attend for _, module in modules]
    for name, module in modules:
        module.attend = partial(attend, name, module.attend)
    try:
        yield trace
    finally:
        for (_, module), before in zip(modules, own, strict=True):
            module.attend = before


def _gather_outputs(trainer: Trainer, plan: Plan, trace: Trace) -> dict[Quantity, Tensor]:
    """The attention outputs of whole sequences, with the heads of all tensor-parallel ranks. Collective."""
    mesh, whole = trainer.meshes.tp, {}
    for quantity, out in trace.events.items():
        if mesh is not None:
            out = DTensor.from_local(out, mesh, [Shard(2)], run_check=False).full_tensor()
        whole[quantity] = plan.unshard(out).float().cpu()
    return gather_pipeline(trainer, whole)


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
        console.print(f"{describe_peaks(comparison.single_peak_bytes, comparison.parallel_peak_bytes)}\n")
    broken = [f"{c.layout}: {row.quantity}" for c in comparisons for row in c.rows if not row.holds]
    console.print("parity holds" if not broken else f"PARITY BROKEN, first at {broken[0]} ({len(broken)} in all)")
