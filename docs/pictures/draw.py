"""Draws the pictures of docs/context_parallel.md from real plans: `python docs/pictures/draw.py`."""

from pathlib import Path

from torchtitan_cp.attention import AttentionMask, Plan, make_plan
from torchtitan_cp.attention.plan import RingStep
from torchtitan_cp.attention.tiles import CAUSAL, Tile, dense_parts

FOLDER = Path(__file__).parent
COLORS = ["#3b6ea8", "#d07a2d", "#4f9153", "#a5507f"]
INK, PAPER, GRID = "#333333", "#ffffff", "#dddddd"
RANKS, SIDE = 4, 300


def svg(width: float, height: float, body: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>', *body, "</svg>\n"])


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", color: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def polygon(points: list[tuple[float, float]], color: str) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polygon points="{joined}" fill="{color}" fill-opacity="0.75" stroke="{PAPER}" stroke-width="0.8"/>'


def tile_shapes(plan: Plan, step: RingStep, tile: Tile, x: float, y: float, color: str) -> list[str]:
    """A tile in the square of all (query, key) pairs, cut where the layout is not contiguous."""
    source = plan.layout.positions(step.source)
    arrived = [int(source[row]) for start, stop in step.receive for row in range(start, stop)]
    unit, queries = SIDE / plan.sequence_length, [int(position) for position in plan.positions]
    shapes = []
    for part in dense_parts(tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, tile.band):
        rows = queries[tile.q_start + part.q_start : tile.q_start + part.q_stop]
        keys = arrived[tile.k_start + part.k_start : tile.k_start + part.k_stop]
        for top, bottom in runs(rows):
            for left, right in runs(keys):
                if part.band == CAUSAL and left > bottom:
                    continue
                corners = [(left, top), (left, bottom), (right, bottom)]
                corners += [] if part.band == CAUSAL and left == top else [(right, top)]
                shapes.append(polygon([(x + key * unit, y + row * unit) for key, row in corners], color))
    return shapes


def runs(positions: list[int]) -> list[tuple[int, int]]:
    """(start, stop) of the unbroken stretches."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


def draw_tiles() -> str:
    packed = AttentionMask(
        document_lengths=(tuple(64 * length for length in (24, 60, 16, 96, 12, 40, 28, 52, 8, 20, 16, 12)),)
    )
    panels = [("zigzag, one document", AttentionMask(), "zigzag"), ("zigzag, packed", packed, "zigzag")]
    panels += [("balanced, packed", packed, "balanced"), ("documents, packed", packed, "documents")]
    body = []
    for number, (title, mask, layout) in enumerate(panels):
        x, y = 30 + number * (SIDE + 50), 60
        plans = [make_plan(64 * 384, mask=mask, ranks=RANKS, rank=rank, layout=layout) for rank in range(RANKS)]
        pairs = [sum(tile.pairs for step in plan.steps for tile in step.tiles) for plan in plans]
        body.append(f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="none" stroke="{GRID}"/>')
        for plan, color in zip(plans, COLORS, strict=True):
            for step in plan.steps:
                for tile in step.tiles:
                    body += tile_shapes(plan, step, tile, x, y, color)
        busiest = max(pairs) * RANKS / sum(pairs)
        body.append(text(x, y - 28, title, 15))
        body.append(
            text(x, y - 10, f"busiest rank {busiest:.2f} of the mean, sends {plans[0].keys_sent:.2f} of its keys", 12)
        )
        body.append(text(x + SIDE / 2, y + SIDE + 18, "keys", 12, "middle"))
    body.append(
        text(16, 60 + SIDE / 2, "queries", 12, "middle").replace("<text", '<text transform="rotate(-90 16 210)"')
    )
    for rank, color in enumerate(COLORS):
        body.append(f'<rect x="{30 + rank * 90}" y="{SIDE + 92}" width="14" height="14" fill="{color}"/>')
        body.append(text(50 + rank * 90, SIDE + 104, f"rank {rank}"))
    return svg(30 + len(panels) * (SIDE + 50), SIDE + 120, body)


def draw_time() -> str:
    plans = [make_plan(64, ranks=RANKS, rank=rank, layout="zigzag") for rank in range(RANKS)]
    width, row, left, top = 200, 74, 80, 50
    body = [text(left + step * width + 4, top - 14, f"step {step}", 14) for step in range(RANKS)]
    for rank, plan in enumerate(plans):
        y = top + rank * row
        body.append(text(10, y + 30, f"rank {rank}", 14))
        for number, step in enumerate(plan.steps):
            x = left + number * width
            words = f"q{rank} x kv{step.source}"
            body.append(
                f'<rect x="{x}" y="{y}" width="{width - 8}" height="28" rx="3" fill="{COLORS[step.source]}" '
                f'fill-opacity="0.8"/>'
            )
            body.append(text(x + 8, y + 19, words, 13, color=PAPER))
            if number + 1 < RANKS:
                following = plan.steps[number + 1]
                rows = sum(stop - start for start, stop in following.receive)
                part = "both halves" if rows == plan.local_tokens else "head half"
                body.append(
                    f'<rect x="{x}" y="{y + 33}" width="{width - 8}" height="20" rx="3" fill="none" '
                    f'stroke="{COLORS[following.source]}" stroke-width="1.6" stroke-dasharray="4 3"/>'
                )
                body.append(text(x + 8, y + 47, f"kv{following.source} arriving: {part}", 11))
    return svg(left + RANKS * width, top + RANKS * row, body)


if __name__ == "__main__":
    (FOLDER / "tiles.svg").write_text(draw_tiles())
    (FOLDER / "ring.svg").write_text(draw_time())
