"""Figures for TensorBoard, as `[height, width, 3]` uint8 arrays.

Drawn on one rank, at evaluations and ends of stages only: matplotlib takes most of a second to import, so it is
imported at the first figure. pyplot, which keeps global state, is not used.
"""

import importlib
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchtitan_cp.attention import Plan
from torchtitan_cp.config.names import format_tokens
from torchtitan_cp.metrics.throughput import imbalance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
WIDTH = 4.2  # inches, of most figures: TensorBoard shows them 3.6 inches wide, so that text stays legible
NOT_ALLOWED = -1
MAX_OCTAVES = 3  # loads of experts beyond 1/8 and 8 times the even share have the same color


def draw_loss_by_position(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float | None]]], *, title: str = ""
) -> np.ndarray:
    """Loss against position on a logarithmic axis, one line per stage: does more context help?

    Args:
        curves: by stage, in order: (first position of each bin, mean loss of its tokens in nats). A bin without tokens
            has NaN or None. `metrics.loss_breakdown` defines the bins.
    """
    figure, axes = _figure(
        WIDTH, 3.0, xlabel="position in the sequence, from", ylabel="loss, nats a token", title=title
    )
    for index, (name, (starts, losses)) in enumerate(curves.items()):
        color = _colors("viridis", 0.9 * index / max(1, len(curves) - 1))
        # A logarithmic axis has no 0: every point is drawn one position further.
        # A legend would leave out a name that begins with an underscore.
        values = np.asarray(losses, dtype=np.float64)  # None becomes NaN
        axes.plot([start + 1 for start in starts], values, marker="o", markersize=4, color=color, label=f" {name}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda position, _: format_tokens(round(position)))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="stage", frameon=False)
    return _pixels(figure)


def draw_retrieval_map(
    accuracy: np.ndarray, lengths: Sequence[int], depths: Sequence[float], *, trained_length: int = 0, title: str = ""
) -> np.ndarray:
    """Accuracy of retrieval by depth (down) and length (across); the darker, the more is right.

    Args:
        accuracy: `[depths, lengths]`, fractions; NaN where nothing was measured.
        lengths: tokens of a prompt.
        depths: where the key was put, as a fraction of the prompt.
        trained_length: a vertical line separates longer lengths.
    """
    rows, labels = [f"{depth:.0%}" for depth in depths], ("tokens of the prompt", "depth of the key")
    figure, axes = _cells(accuracy, lengths, rows, labels, title)
    trained = sum(length <= trained_length for length in lengths)
    if 0 < trained < len(lengths):
        axes.axvline(trained - 0.5, color="crimson", linewidth=2.5)
    return _pixels(figure)


def draw_reach(
    stages: Sequence[tuple[str, int]], lengths: Sequence[int], found: np.ndarray, *, title: str = ""
) -> np.ndarray:
    """How far back each stage's model finds keys: a row for each stage, a column for each length of prompts.

    The darker, the more are found; a line ends the stage's length.

    Args:
        stages: name and sequence length of each.
        lengths: tokens of the prompts, rising.
        found: `[stages, lengths]`, fractions; NaN where nothing was asked.
    """
    rows, labels = [name for name, _ in stages], ("tokens of a prompt with the key in its upper half", "stage")
    figure, axes = _cells(found, lengths, rows, labels, title)
    for row, (_, seq_len) in enumerate(stages):
        edge = sum(length <= seq_len for length in lengths) - 0.5
        axes.plot([edge, edge], [row - 0.5, row + 0.5], color="crimson", linewidth=2.5)
    return _pixels(figure)


def _cells(
    values: np.ndarray, columns: Sequence[int], rows: Sequence[str], labels: tuple[str, str], title: str
) -> "tuple[Figure, Axes]":
    """A map of fractions with the percentage in each cell, which is the darker the higher: it needs no colors.

    Args:
        values: `[rows, columns]`; NaN leaves a cell gray.
        columns: tokens.
        labels: of columns and rows.
    """
    width, height = max(WIDTH, 1.0 + 0.42 * len(columns)), 1.1 + 0.3 * len(rows)
    figure, axes = _figure(width, height, xlabel=labels[0], ylabel=labels[1], title=title)
    axes.imshow(np.ma.masked_invalid(values), cmap="YlGnBu", vmin=0, vmax=1, aspect="auto")
    axes.set_facecolor("#dddddd")
    axes.set_xticks(range(len(columns)), [format_tokens(tokens) for tokens in columns])
    axes.set_yticks(range(len(rows)), rows)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "white" if value > 0.6 else "black"
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=color)
    return figure, axes


def draw_document_lengths(tokens: np.ndarray, source: str) -> np.ndarray:
    """The share of a source's tokens in documents of each length, in powers of two.

    Args:
        tokens: `[documents]` int, the length of each.
    """
    lengths = tokens[tokens > 0]
    octaves = np.floor(np.log2(lengths)).astype(int) if len(lengths) else np.zeros(1, int)
    shares = np.bincount(octaves - octaves.min(), weights=lengths if len(lengths) else [0]) / max(1, lengths.sum())
    title = f"{source}: {len(lengths):,} documents"
    figure, axes = _figure(WIDTH, 2.6, xlabel="tokens of the document, from", ylabel="share of tokens", title=title)
    axes.bar(range(len(shares)), shares, color=_colors("viridis", 0.4))
    axes.set_xticks(range(len(shares)), [format_tokens(2 ** (octaves.min() + index)) for index in range(len(shares))])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    return _pixels(figure)


def draw_attention_owners(plan: Plan, title: str = "") -> np.ndarray:
    """Which rank computes which part of a batch row's attention.

    Args:
        plan: of any rank of the context-parallel group.
    """
    owners, ranks = attention_owners(plan), plan.ring_layout.ranks
    figure, axes = _figure(WIDTH, WIDTH, xlabel="key", ylabel="query")
    colors = _colors("viridis", np.linspace(0.95, 0.1, ranks))  # the higher the rank, the darker
    image = np.ones((*owners.shape, 3))
    image[owners != NOT_ALLOWED] = colors[owners[owners != NOT_ALLOWED], :3]
    axes.imshow(image, extent=(0, plan.sequence_length, plan.sequence_length, 0), interpolation="nearest")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda position, _: format_tokens(round(position)))
    axes.set_title(f"{title}\n{ranks} ranks, the busiest has {imbalance(plan):.2f} times the mean", fontsize="medium")
    for rank in range(min(ranks, 8)):
        axes.plot([], [], marker="s", linestyle="", color=colors[rank], label=f"rank {rank}")
    axes.legend(loc="upper right", frameon=False)
    return _pixels(figure)


def draw_expert_loads(loads: np.ndarray, *, title: str = "") -> np.ndarray:
    """Load of each expert (across) of each layer (down): the lighter, the more tokens; black at none.

    Args:
        loads: `[layers, X]`, tokens of each expert over the even share; NaN leaves a cell white.
    """
    layers, experts = loads.shape
    width, height = 3.0 + min(6.0, 0.2 * experts), 1.6 + min(8.0, 0.2 * layers)
    figure, axes = _figure(width, height, xlabel="expert", ylabel="layer", title=title)
    octaves = np.log2(np.clip(loads, 2.0**-MAX_OCTAVES, None))  # NaN stays
    colors = importlib.import_module("matplotlib").colormaps["viridis"].with_extremes(under="black", bad="white")
    values = np.where(loads == 0, -MAX_OCTAVES - 1, octaves)
    image = axes.imshow(values, colors, aspect="auto", vmin=-MAX_OCTAVES, vmax=MAX_OCTAVES, interpolation="nearest")
    bar = figure.colorbar(image, label="tokens over the even share")
    bar.ax.yaxis.set_major_formatter(lambda octave, _: f"{2.0**octave:g}")
    axes.locator_params(integer=True)
    return _pixels(figure)


def attention_owners(plan: Plan, pixels: int = 480) -> np.ndarray:
    """`[n, n]` int64: the rank that computes each (query, key) of the first batch row, or NOT_ALLOWED.

    Sampled at the middles of n = min(S, pixels) equal stretches. Every exchange computes a pair where its query lives;
    with all-to-all, a rank stands for the group that trades heads for sequence.
    """
    layout, length, mask = plan.ring_layout, plan.sequence_length, plan.mask
    count = min(length, pixels)
    sampled = (np.arange(count) * 2 + 1) * length // (2 * count)
    starts = [segment.start for segment in layout.segments]
    held = np.array([segment.rank for segment in layout.segments])
    owners = held[np.searchsorted(starts, sampled, side="right") - 1, None]
    document = np.full(count, NOT_ALLOWED)
    for number, (start, stop) in enumerate(mask.documents(length)[0]):
        document[(sampled >= start) & (sampled < stop)] = number
    distance, band = sampled - sampled[:, None], mask.band
    allowed = (document[:, None] == document) & (document != NOT_ALLOWED)
    allowed &= distance >= (-length if band.low is None else band.low)
    allowed &= distance <= (length if band.high is None else band.high)
    return np.where(allowed, owners, NOT_ALLOWED)


def _colors(name: str, values: float | np.ndarray) -> np.ndarray:
    """RGBA of one value from 0 to 1, or of several, in a color map."""
    return np.asarray(importlib.import_module("matplotlib").colormaps[name](values))


def _figure(width: float, height: float, **labels: str) -> "tuple[Figure, Axes]":
    """A figure of this many inches, and its axes with their labels and title."""
    importlib.import_module("matplotlib").rcParams["text.parse_math"] = False  # a stage's name may have dollar signs
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.add_subplot(**labels)
    axes.title.set_fontsize("medium")
    return figure, axes


def to_png(pixels: np.ndarray) -> bytes:
    """An image as the bytes of a PNG file."""
    file = io.BytesIO()
    importlib.import_module("matplotlib.image").imsave(file, pixels, format="png")
    return file.getvalue()


def _pixels(figure: "Figure") -> np.ndarray:
    canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
