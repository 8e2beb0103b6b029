"""Estimates as tables for a person."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from torchtitan_cp.planner.devices import ACCELERATORS, USABLE_MEMORY, Cluster
from torchtitan_cp.planner.estimate import Estimate, Volume
from torchtitan_cp.planner.exchange import EXCHANGES

GIB = 2**30
# Keys of a stage's [data] that leave pairs of attention out.
CUTTING = ("document_mask", "short_share", "growth_from")
KINDS = ("weights", "gradients", "optimizer", "block_inputs", "attention", "mlp", "loss", "communication")


def print_estimates(
    console: Console, estimates: Sequence[Estimate], volumes: Sequence[dict[str, Volume]], cluster: Cluster
) -> None:
    """Three tables: memory, messages of attention, time; a row a stage.

    Args:
        volumes: of each stage, strategy -> what the busiest rank sends.
    """
    accelerator = cluster.accelerator
    taken = "Assumed" if cluster.name in ACCELERATORS else "Measured"
    console.print(
        f"{cluster.ranks} x {cluster.name}, {cluster.ranks_per_node} a node; a rank sends "
        f"{cluster.link_bandwidth / 1e9:g} GB/s inside a node and {cluster.network_bandwidth / 1e9:g} GB/s outside\n"
        f"{estimates[0].parameters:,} parameters. Device: {accelerator.source}. {taken}: matrix products at "
        f"{accelerator.linear:.0%} of the peak, attention at {accelerator.attention_forward:.0%} forward and "
        f"{accelerator.attention_backward:.0%} backward; assumed: {USABLE_MEMORY:.0%} of memory usable"
    )
    for table in (memory_table(estimates), volume_table(estimates, volumes), time_table(estimates)):
        console.print(table)
    for estimate in estimates:
        if cheaper := [key for key in CUTTING if getattr(estimate.stage.data, key)]:
            keys = ", ".join(cheaper)
            console.print(f"{estimate.stage.name} is planned as one causal sequence: {keys} makes it cheaper")
    days = sum(estimate.days for estimate in estimates)
    console.print(f"{days:.3g} days in all")
    for estimate in estimates:
        if not estimate.fits:
            over = (estimate.memory.total - estimate.usable_bytes) / GIB
            console.print(
                f"DOES NOT FIT: {estimate.stage.name} needs {estimate.memory.total / GIB:.1f} GiB a rank, {over:.1f} "
                f"more than there are, during {estimate.memory.moment}. --search looks for a layout that fits"
            )


def memory_table(estimates: Sequence[Estimate]) -> Table:
    """GiB of the fullest rank by kind."""
    table = Table("stage", *(kind.replace("_", " ") for kind in KINDS), "sum", "fits", "fullest during")
    table.title = "memory of a rank, GiB"
    for estimate in estimates:
        kinds = estimate.memory.by_kind()
        cells = [f"{kinds[kind] / GIB:.2f}" for kind in KINDS]
        verdict = "yes" if estimate.fits else "NO"
        total = f"{estimate.memory.total / GIB:.2f}"
        table.add_row(estimate.stage.name, *cells, total, verdict, estimate.memory.moment)
    return table


def volume_table(estimates: Sequence[Estimate], volumes: Sequence[dict[str, Volume]]) -> Table:
    """What the busiest rank sends for attention under each strategy."""
    table = Table(
        "stage", "cp", "strategy", *EXCHANGES, title="attention's messages, sent by a rank: MiB a layer, GiB a step"
    )
    for estimate, of_stage in zip(estimates, volumes, strict=True):
        cells = []
        for name in EXCHANGES:
            volume = of_stage.get(name)
            cells.append(f"{volume.layer_bytes / 2**20:.1f}, {volume.step_bytes / GIB:.2f}" if volume else "-")
        table.add_row(estimate.stage.name, str(estimate.stage.cp), estimate.strategy, *cells)
    return table


def time_table(estimates: Sequence[Estimate]) -> Table:
    """FLOPs, time and speed."""
    table = Table("stage", "PFLOP linear", "attention", "micro-batches", "exposed, s", "step, s", "tokens/s", "MFU")
    for name in ("steps", "days", "limited by"):
        table.add_column(name)
    table.title = "a step of the whole job"
    for estimate in estimates:
        table.add_row(
            estimate.stage.name,
            f"{estimate.linear_flops / 1e15:.4g}",
            f"{estimate.attention_flops / 1e15:.4g}",
            str(estimate.stage.micro_batches),
            f"{estimate.exposed_seconds:.3g}",
            f"{estimate.step_seconds:.4g}",
            f"{estimate.tokens_per_second:,.0f}",
            f"{estimate.mfu:.1%}",
            str(estimate.stage.steps),
            f"{estimate.days:.3g}",
            estimate.limit,
        )
    return table
