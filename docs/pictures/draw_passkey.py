"""Draws passkey_by_stage.png from a run of train_configs/long_range_on_cpu.toml.

`python docs/pictures/draw_passkey.py RUN`; RUN is the run's folder (default outputs/long-range), whose evaluation.jsonl
has the accuracies.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
RUN = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/long-range")


def last_evaluations(path: Path) -> list[dict]:
    """The last evaluation of each stage, in the order of the stages."""
    records = (json.loads(line) for line in path.read_text().splitlines())
    return list({record["stage"]: record for record in records}.values())


def draw(records: list[dict]) -> Figure:
    figure = Figure(figsize=(11, 3.4), dpi=120, layout="constrained")
    axes = figure.subplots(1, len(records), sharey=True)
    for axis, record in zip(axes, records, strict=True):
        found = record["retrieval"]["passkey"]
        image = axis.imshow(found["accuracy"], cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axis.set_title(f"after the stage of {record['seq_len']:,} tokens", fontsize=11)
        axis.set_xticks(range(len(found["lengths"])), [f"{length:,}" for length in found["lengths"]])
        axis.set_xlabel("tokens of the prompt")
        trained = sum(length <= record["seq_len"] for length in found["lengths"])
        axis.axvline(trained - 0.5, color="black", linewidth=2)
        for row, accuracies in enumerate(found["accuracy"]):
            for column, accuracy in enumerate(accuracies):
                if accuracy is not None:
                    axis.text(column, row, f"{accuracy:.0%}", ha="center", va="center", fontsize=8)
    depths = records[0]["retrieval"]["passkey"]["depths"]
    axes[0].set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes[0].set_ylabel("depth of the planted key")
    figure.colorbar(image, ax=axes, label="keys found", format=lambda value, _: f"{value:.0%}")
    return figure


if __name__ == "__main__":
    draw(last_evaluations(RUN / "evaluation.jsonl")).savefig(FOLDER / "passkey_by_stage.png")
