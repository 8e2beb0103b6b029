"""Draws the picture of docs/design.md from real plans: `python docs/pictures/draw_documents.py`."""

from itertools import accumulate, pairwise
from pathlib import Path

from torchtitan_cp.attention import AttentionMask, Plan, make_plan

FOLDER = Path(__file__).parent
COLORS = ["#3b6ea8", "#d07a2d", "#4f9153", "#a5507f"]
INK, SOFT, PAPER, GRID = "#333333", "#777777", "#ffffff", "#dddddd"
RANKS, UNIT = 4, 64
DOCUMENTS = tuple(UNIT * length for length in (24, 120, 16, 44, 20, 40, 28, 36, 24, 32))
LEFT, WIDTH, ROW, BAR = 80, 860, 30, 20


def text(x: float, y: float, words: str, size: int = 13, color: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}">{words}</text>'


def bar(start: int, stop: int, y: float, color: str) -> str:
    unit = WIDTH / sum(DOCUMENTS)
    return (
        f'<rect x="{LEFT + start * unit:.1f}" y="{y:g}" width="{(stop - start) * unit:.1f}" height="{BAR}" '
        f'fill="{color}" fill-opacity="0.8" stroke="{PAPER}" stroke-width="1"/>'
    )


def borders(top: float, bottom: float) -> list[str]:
    unit = WIDTH / sum(DOCUMENTS)
    return [
        f'<line x1="{LEFT + at * unit:.1f}" y1="{top:g}" x2="{LEFT + at * unit:.1f}" y2="{bottom:g}" stroke="{GRID}"/>'
        for at in accumulate(DOCUMENTS, initial=0)
    ]


def pairs_of(plan: Plan) -> int:
    return sum(tile.pairs for step in plan.steps for tile in step.tiles)


def draw() -> str:
    mask, length = AttentionMask(document_lengths=(DOCUMENTS,)), sum(DOCUMENTS)
    body = [text(LEFT, 20, "one sequence of ten documents", 15)]
    body += borders(30, 30 + BAR)
    body += [bar(start, stop, 30, SOFT) for start, stop in pairwise(accumulate(DOCUMENTS, initial=0))]
    y = 96.0
    for layout in ("documents", "balanced", "zigzag"):
        plans = [make_plan(length, mask=mask, ranks=RANKS, rank=rank, layout=layout) for rank in range(RANKS)]
        pairs = [pairs_of(plan) for plan in plans]
        body.append(text(LEFT, y - 8, layout, 15))
        busiest = max(pairs) * RANKS / sum(pairs)
        numbers = f"busiest rank {busiest:.2f} of the mean; a rank sends {plans[0].keys_sent:.2f} of its keys"
        body.append(text(LEFT + 110, y - 8, numbers, 13, SOFT))
        body += borders(y, y + RANKS * ROW)
        for rank, (plan, color) in enumerate(zip(plans, COLORS, strict=True)):
            body.append(text(16, y + rank * ROW + 16, f"rank {rank}"))
            body += [bar(start, stop, y + rank * ROW + 2, color) for start, stop in plan.layout.spans[rank]]
        y += RANKS * ROW + 44
    size = f"{LEFT + WIDTH + 20:g} {y - 20:g}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif">'
    width, height = size.split()
    paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join([head, paper, *body, "</svg>\n"])


if __name__ == "__main__":
    (FOLDER / "documents.svg").write_text(draw())
