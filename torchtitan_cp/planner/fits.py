"""What fits on several numbers of GPUs: a search on each, and one table of what they found."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import Config, UserError
from torchtitan_cp.config.names import format_duration
from torchtitan_cp.planner.choices import Choice, Savings
from torchtitan_cp.planner.devices import GIB, Cluster
from torchtitan_cp.planner.search import Candidate, Search, search
from torchtitan_cp.planner.search_report import shortfall

COLUMNS = ("GPUs", "fits", "device, host GiB", "layout", "activations", "on the host", "step", "offload", "tokens/s")


class Row(NamedTuple):
    """A number of GPUs, and what a search found there, or why a run would refuse them."""

    cluster: Cluster
    result: Search | UserError | ContextParallelError


def search_each(config: Config, clusters: Sequence[Cluster]) -> list[Row]:
    """A search on each cluster."""
    rows = []
    for cluster in clusters:
        try:
            rows.append(Row(cluster, search(config, cluster)))
        except (UserError, ContextParallelError) as error:
            rows.append(Row(cluster, error))
    return rows


def print_fits(console: Console, rows: Sequence[Row]) -> bool:
    """Print a line for each number of GPUs. Returns whether anything fits."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"{rows[0].cluster.name}: the fastest that fits")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in ("GPUs", "step", "offload", "tokens/s") else "left")
    refusals = []
    for cluster, result in rows:
        if isinstance(result, Search):
            table.add_row(str(cluster.ranks), *_cells(result))
        else:
            table.add_row(str(cluster.ranks), "refused")
            refusals.append(f"{cluster.ranks} GPUs are refused: {result}")
    console.print(table)
    console.print(*refusals, sep="\n", end="\n" if refusals else "")
    console.print(
        "step: seconds of the longest stage's step; offload: of these, what copies and updates on the host cost"
    )
    return any(isinstance(row.result, Search) and row.result.found for row in rows)


def _cells(result: Search) -> list[str]:
    """The cells of a line after the number of GPUs: of what was found, or of the nearest miss."""
    shown = result.found or result.nearest
    fullest, slowest = shown.fullest, max(shown.picked, key=lambda estimate: estimate.step_seconds)
    fits = "yes" if result.found else f"misses by {shortfall(fullest)}"
    tokens = sum(estimate.stage.steps * estimate.stage.global_batch_tokens for estimate in shown.picked)
    seconds = sum(estimate.stage.steps * estimate.step_seconds for estimate in shown.picked)
    rates = [format_duration(slowest.step_seconds), format_duration(slowest.offload_seconds)]
    return [
        fits,
        ", ".join(f"{need.needed_bytes / GIB:.1f}" for need in fullest.needs),
        _layout(shown),
        _activations(shown.choice),
        on_host(shown.choice.savings),
        *(rates if result.found else ["", ""]),
        f"{tokens / seconds:,.0f}" if result.found else "",
    ]


def _layout(shown: Candidate) -> str:
    """Degrees above 1, with cp and strategy of each stage."""
    degrees = [
        f"{name} {getattr(shown.choice, name)}" for name in ("tp", "pp", "ep") if getattr(shown.choice, name) > 1
    ]
    exchanges = (f"cp {e.stage.cp} {e.stage.strategy}" if e.stage.cp > 1 else "cp 1" for e in shown.picked)
    return ", ".join([*degrees, " / ".join(dict.fromkeys(exchanges))])


def _activations(choice: Choice) -> str:
    tiles = choice.savings.mlp_tiles
    return choice.checkpoint + (f", {tiles} mlp_tiles" if tiles > 1 else "")


def on_host(savings: Savings) -> str:
    """What lies in host memory."""
    state = "weights, optimizer" if savings.fsdp_cpu_offload else "optimizer" if savings.offload_state else ""
    return ", ".join(filter(None, ("activations" if savings.offload else "", state)))
