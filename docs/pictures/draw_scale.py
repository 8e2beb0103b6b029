"""Draws the pictures of docs/scale.md from the JSON of `python -m benchmarks scale`, its one argument."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
COLORS = {"ring": "#3b6ea8", "all_gather": "#d07a2d", "all_to_all": "#4f9153", "hybrid": "#a5507f"}
TITLES = {"causal": "one document, causal", "packed": "packed documents, log-normal"}
CLOSE, MEGA = 1.05, 1 << 20
Row = dict[str, Any]


def short(count: int) -> str:
    return f"{count // MEGA}M" if count >= MEGA else f"{count // 1024}K"


def where_each_wins(rows: list[Row], path: Path) -> None:
    """A cell for each length and number of ranks: the fastest, pale where another is close, and what is exposed."""
    lengths, ranks = (sorted({row[name] for row in rows}) for name in ("tokens", "ranks"))
    figure, panels = plt.subplots(1, 2, figsize=(13, 4.6), sharey=True)
    for panel, (mask, title) in zip(panels, TITLES.items(), strict=True):
        for y, length in enumerate(lengths):
            for x, count in enumerate(ranks):
                cell = [row for row in rows if (row["mask"], row["tokens"], row["ranks"]) == (mask, length, count)]
                first, second = sorted(cell, key=lambda row: row["ms"])[:2]
                close = second["ms"] < CLOSE * first["ms"]
                panel.add_patch(
                    plt.Rectangle(
                        (x, y), 1, 1, color=COLORS[first["strategy"]], alpha=0.45 if close else 1, linewidth=0
                    )
                )
                share = f"{first['exposed_share']:.0%}"
                panel.text(x + 0.5, y + 0.5, share, ha="center", va="center", fontsize=8, color="white")
        panel.set(xlim=(0, len(ranks)), ylim=(0, len(lengths)), title=title, xlabel="ranks")
        panel.set_xticks([x + 0.5 for x in range(len(ranks))], [f"{count:,}" for count in ranks], fontsize=8)
    panels[0].set_yticks([y + 0.5 for y in range(len(lengths))], [short(length) for length in lengths])
    panels[0].set_ylabel("tokens of the sequence")
    patches = [matplotlib.patches.Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=patches, loc="lower center", ncol=4, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=90)


def speed_up(rows: list[Row], length: int, path: Path) -> None:
    """How many times as fast as eight ranks' fastest, by the number of ranks."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    for panel, (mask, title) in zip(panels, TITLES.items(), strict=True):
        own = [row for row in rows if row["mask"] == mask and row["tokens"] == length]
        ranks = sorted({row["ranks"] for row in own})
        base = min(row["ms"] for row in own if row["ranks"] == ranks[0])
        panel.plot(ranks, [count / ranks[0] for count in ranks], color="#bbbbbb", linestyle="--", label="in proportion")
        for name, color in COLORS.items():
            line = sorted((row["ranks"], base / row["ms"]) for row in own if row["strategy"] == name)
            panel.plot(*zip(*line, strict=True), color=color, marker="o", markersize=3, label=name)
        panel.set(xscale="log", yscale="log", title=f"{short(length)} tokens, {title}", xlabel="ranks")
        panel.set_xticks(ranks, [f"{count:,}" for count in ranks], fontsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"speed, {ranks[0]} ranks' fastest = 1")
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    matplotlib.use("agg")
    figures = json.loads(Path(sys.argv[1]).read_text())["scale"]["rows"]
    where_each_wins(figures, FOLDER / "scale_map.png")
    speed_up(figures, MEGA, FOLDER / "scale_1m.png")
