"""Pictures for TensorBoard, as `[height, width, 3]` uint8 arrays.

Drawn at validations and ends of stages only, on one rank: matplotlib, most of a second to import, waits until then.
The figures are made without pyplot, which keeps state.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan_cp.attention import Plan
from torchtitan_cp.attention.plan import ring_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110
MOST_WRITTEN_CELLS = 150  # a heat map of more has colours only
NOBODY = -1


def loss_against_position(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> np.ndarray:
    """Loss against position on a logarithmic axis, one line per stage: does more context help?

    Args:
        curves: by name of the stage, in order: (first position of each bin, mean loss of its tokens in nats). A bin
            without tokens has NaN. See `metrics.positions`.
    """
    figure, axes = _figure(7.0, 4.2)
    for index, (name, (starts, losses)) in enumerate(curves.items()):
        color = _colors("viridis", 0.9 * index / max(1, len(curves) - 1))
        # Position 0 has no place on a logarithmic axis: each point stands one further.
        axes.plot([start + 1 for start in starts], losses, marker="o", markersize=4, color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda place, _: in_k(round(place)))
    axes.set(xlabel="position in the sequence, from", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if curves:
        axes.legend(title="stage", frameon=False)
    return _pixels(figure)


def passkey_map(
    accuracy: np.ndarray, lengths: Sequence[int], depths: Sequence[float], *, trained_length: int = 0, title: str = ""
) -> np.ndarray:
    """Accuracy of passkey retrieval by depth (down) and length (across): 0 red, 1 green.

    Args:
        accuracy: `[depths, lengths]`, fractions; NaN where nothing was measured.
        lengths: tokens of a prompt.
        depths: where the key was put, as a fraction of the prompt.
        trained_length: lengths beyond it are right of a line.
    """
    figure, axes = _figure(1.8 + 0.62 * len(lengths), 1.7 + 0.42 * len(depths))
    axes.imshow(np.ma.masked_invalid(accuracy), cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_facecolor("#dddddd")
    axes.set_xticks(range(len(lengths)), [in_k(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set(xlabel="tokens of the prompt", ylabel="depth of the key", title=title)
    if accuracy.size <= MOST_WRITTEN_CELLS:
        for (row, column), value in np.ndenumerate(accuracy):
            if np.isfinite(value):
                axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=8)
    trained = sum(length <= trained_length for length in lengths)
    if 0 < trained < len(lengths):
        axes.axvline(trained - 0.5, color="black", linewidth=2)
    return _pixels(figure)


def length_histogram(tokens: np.ndarray, source: str) -> np.ndarray:
    """Which share of a source's tokens lies in documents of which length, in powers of two.

    Args:
        tokens: `[documents]` int, the length of each.
    """
    held = tokens[tokens > 0]
    octaves = np.floor(np.log2(held)).astype(int)
    low, high = (int(octaves.min()), int(octaves.max())) if len(held) else (0, 0)
    shares = np.bincount(octaves - low, weights=held, minlength=high - low + 1) / max(1, held.sum())
    figure, axes = _figure(7.0, 3.6)
    axes.bar(range(len(shares)), shares, color=_colors("viridis", 0.4))
    axes.set_xticks(range(len(shares)), [in_k(2**octave) for octave in range(low, high + 1)])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set(
        xlabel="tokens of the document, from", ylabel="share of tokens", title=f"{source}: {len(held):,} documents"
    )
    axes.spines[["top", "right"]].set_visible(False)
    return _pixels(figure)


def tile_map(plan: Plan, title: str = "") -> np.ndarray:
    """Which rank computes which part of a batch row's attention, as its plan's tiles say.

    Args:
        plan: of any rank of the context-parallel group.
    """
    owners = tile_owners(plan)
    ranks = plan.ring_layout.chunks
    share = np.array([(owners == rank).sum() for rank in range(len(ranks))])
    figure, axes = _figure(5.4, 5.4)
    colors = _colors("turbo", np.linspace(0.1, 0.9, len(ranks)))
    picture = np.ones((*owners.shape, 3))
    picture[owners != NOBODY] = colors[owners[owners != NOBODY], :3]
    axes.imshow(picture, extent=(0, plan.sequence_length, plan.sequence_length, 0), interpolation="nearest")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda place, _: in_k(round(place)))
    busiest = share.max() / share.mean() if share.sum() else 1.0
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(f"{title}\n{len(ranks)} ranks, the busiest has {busiest:.2f} times the mean", fontsize=10)
    for rank in range(min(len(ranks), 8)):
        axes.plot([], [], marker="s", linestyle="", color=colors[rank], label=f"rank {rank}")
    axes.legend(loc="upper right", frameon=False, fontsize=8)
    return _pixels(figure)


def tile_owners(plan: Plan, pixels: int = 480) -> np.ndarray:
    """The attention of the first batch row, sampled: `[n, n]` int64, the rank that computes (query, key), or NOBODY.

    Samples are the middles of n = min(S, pixels) even stretches. With heads traded for sequence, a rank stands for
    the group that trades.
    """
    layout, length = plan.ring_layout, plan.sequence_length
    count = min(length, pixels)
    sampled = (np.arange(count) * 2 + 1) * length // (2 * count)
    chunk, offset = np.divmod(sampled, layout.chunk_tokens)
    held = np.array(layout.owners)[chunk]
    owner, local = held[:, 0], held[:, 1] + offset
    owners = np.full((count, count), NOBODY)
    for rank in range(len(layout.chunks)):
        for step in ring_steps(layout, plan.mask, length, rank):
            arrived = _place_in(step.receive, local)
            for tile in step.tiles:
                if tile.row > 0:
                    continue
                rows = np.flatnonzero((owner == rank) & (local >= tile.q_start) & (local < tile.q_stop))
                columns = np.flatnonzero((owner == step.source) & (arrived >= tile.k_start) & (arrived < tile.k_stop))
                low, high = tile.band
                distance = (arrived[columns] - tile.k_start) - (local[rows, None] - tile.q_start)
                allowed = (distance >= (-length if low is None else low)) & (
                    distance <= (length if high is None else high)
                )
                within = np.ix_(rows, columns)
                owners[within] = np.where(allowed, rank, owners[within])
    return owners


def _place_in(spans: Sequence[tuple[int, int]], local: np.ndarray) -> np.ndarray:
    """Where local rows lie in the concatenation of spans; -1 where in none."""
    place, before = np.full_like(local, -1), 0
    for start, stop in spans:
        inside = (local >= start) & (local < stop)
        place[inside] = before + local[inside] - start
        before += stop - start
    return place


def in_k(tokens: int) -> str:
    """512, 4K, 1M: thousands and millions in powers of two where they are whole."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


def _colors(name: str, where: Any) -> Any:
    """RGBA at a place, or at several, from 0 to 1 of a colour map."""
    return importlib.import_module("matplotlib").colormaps[name](where)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, figure.add_subplot()


def _pixels(figure: Figure) -> np.ndarray:
    canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
