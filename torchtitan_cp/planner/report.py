"""Estimates as tables for a person."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from torchtitan_cp.config.names import format_duration
from torchtitan_cp.planner.devices import ACCELERATORS, GB, GIB, USABLE_MEMORY
from torchtitan_cp.planner.estimate import SECONDS_A_DAY, Estimate
from torchtitan_cp.planner.parameters import total_parameters
from torchtitan_cp.planner.stage import MASKING_KEYS
from torchtitan_cp.planner.strategy_costs import STRATEGY_COSTS


def _tables(estimate: Estimate) -> dict[str, dict[str, str]]:
    """The figures of a stage: title of a table -> name of a row -> cell."""
    stage, memory, rows = estimate.stage, estimate.memory, estimate.dispatch_bytes / GIB
    sent = {name: f"{of.layer_bytes / 2**20:.1f}, {of.step_bytes / GIB:.2f}" for name, of in estimate.volumes.items()}
    return {
        "memory of a rank, GiB": {
            **{kind.replace("_", " "): f"{size / GIB:.2f}" for kind, size in memory.by_kind.items()},
            "sum": f"{memory.total / GIB:.2f}",
            "fits": "yes" if estimate.fits_device else "NO",
            "peak during": memory.phase,
        },
        "host memory of a node, GiB": {
            **{kind: f"{size / GIB:.2f}" for kind, size in estimate.host.items()},
            "sum": f"{sum(estimate.host.values()) / GIB:.2f}",
            "fits": "yes" if estimate.fits_host else "NO",
        },
        "attention's messages, sent by a rank: MiB a layer, GiB a step": {
            "cp": str(stage.cp),
            "strategy": estimate.strategy,
            **{name: sent.get(name, "-") for name in STRATEGY_COSTS},
        },
        "rows sent to experts and back, by a rank: GiB a step": {
            "ep": str(estimate.degrees.ep),
            "in all": f"{rows:.2f}",
            "to other ranks": f"{rows * (1 - 1 / estimate.degrees.ep):.2f}",
        },
        "a step of the whole job": {
            "PFLOP linear": f"{estimate.linear_flops / 1e15:.4g}",
            "attention": f"{estimate.attention_flops / 1e15:.4g}",
            "micro-batches": str(stage.micro_batches),
            "exposed, s": f"{estimate.exposed_seconds:.3g}",
            "step, s": f"{estimate.step_seconds:.4g}",
            "tokens/s": f"{estimate.tokens_per_second:,.0f}",
            "MFU": f"{estimate.mfu:.1%}",
            "steps": str(stage.steps),
            "duration": format_duration(estimate.days * SECONDS_A_DAY),
            "limited by": estimate.limit,
        },
    }


def misfit(name: str, needed_bytes: float, usable_bytes: float, of: str, holder: str) -> str:
    """The sentence about a stage that does not fit."""
    over = (needed_bytes - usable_bytes) / GIB
    return f"DOES NOT FIT: {name} needs {needed_bytes / GIB:.1f} GiB {of}, {over:.1f} more than {holder} has"


def _kernels(estimate: Estimate, window: int) -> tuple[str, str]:
    """The attention kernel of layers with this window, and what to add if the backward has another."""
    forward, backward = estimate.kernel(window), estimate.kernel(window, backward=True)
    return forward, "" if backward == forward else f" and {backward}"


def print_estimates(console: Console, estimates: Sequence[Estimate]) -> None:
    """Print four tables, a fifth if ranks share experts, and remarks on single stages."""
    cluster = estimates[0].cluster
    accelerator = cluster.accelerator
    windows = {mixer.window for mixer in estimates[0].args.mixers if mixer.n_heads}
    layers = sorted({(*_kernels(one, window), one.attention_shares(window)) for one in estimates for window in windows})
    rate = "attention by {}{} at {:.0%} forward and {:.0%} backward"
    described = (rate.format(kernel, other, *shares) for kernel, other, shares in layers)
    attention = ", ".join(dict.fromkeys(described))
    known = accelerator.host_bytes
    host = f"; a node's host has {known / GB:,.0f} GB" if known else ""
    rates = "Rates of the device table" if cluster.name in ACCELERATORS else "Measured"
    parameters = total_parameters(estimates[0].config.model, estimates[0].args)
    console.print(
        f"{cluster.ranks} x {cluster.name}, {accelerator.ranks_per_node} a node; a rank sends "
        f"{accelerator.link_bandwidth / 1e9:g} GB/s inside a node and {accelerator.network_bandwidth / 1e9:g} GB/s "
        f"outside\n{parameters:,} parameters. Device: {accelerator.source}. {rates}: "
        f"matrix products at {accelerator.linear:.0%} of the peak, {attention}; assumed: "
        f"{USABLE_MEMORY:.0%} of memory usable{host}"
    )
    tables = [_tables(estimate) for estimate in estimates]
    for title, columns in tables[0].items():
        if "experts" in title and estimates[0].degrees.ep == 1:
            continue
        # Each stage is a column, because rows with a dozen figures would be cut off on a terminal.
        table = Table(Column("stage", no_wrap=True), title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for estimate in estimates:
            table.add_column(estimate.stage.name)
        for name in columns:
            table.add_row(name, *(cells[title][name] for cells in tables))
        console.print(table)
    for estimate in estimates:
        if keys := ", ".join(key for key in MASKING_KEYS if getattr(estimate.stage.data, key)):
            console.print(f"{estimate.stage.name} is planned as one causal sequence: {keys} makes it cheaper")
    days = sum(estimate.days for estimate in estimates)
    console.print(f"{format_duration(days * SECONDS_A_DAY)} in all")
    for estimate in estimates:
        name, memory = estimate.stage.name, estimate.memory
        if not estimate.fits_device:
            needed = misfit(name, memory.total, cluster.usable_bytes, "a rank", "the device")
            console.print(f"{needed}, during {memory.phase}. --search looks for a layout that fits")
        if not estimate.fits_host:
            needed = misfit(name, sum(estimate.host.values()), cluster.usable_host_bytes, "a node", "its host")
            console.print(f"{needed}. What activation.offload and the like keep there is in the table of host memory")
