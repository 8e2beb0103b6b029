"""Draws the pictures of docs/architecture.md: `python docs/pictures/draw_architecture.py`."""

from pathlib import Path

FOLDER = Path(__file__).parent
INK, SOFT, PAPER = "#333333", "#777777", "#ffffff"

# Each floor imports only what lies below it; rooms of one floor do not know each other.
FLOORS = [
    ("#f3d9b1", [("train.py", "what each rank runs"), ("cli/", "one file a command; imports models/")]),
    ("#e8e3b5", [("planner/", "memory, messages, time, search, dry run")]),
    ("#cfe3c4", [("training/", "resolve · trainer · model · parity")]),
    (
        "#c3dde6",
        [
            ("curriculum/", "stages, gates, RoPE"),
            ("data/", "corpus, batches"),
            ("parallel/", "FSDP2, TP, PP"),
            ("optim/", "loss, optimizers"),
            ("checkpoint/", "save, verify, resume"),
            ("health/", "bad steps"),
            ("metrics/", "what a run says"),
            ("evaluation/", "held-out text"),
            ("runtime/", "ranks, watchdog"),
        ],
    ),
    (
        "#d8d0e8",
        [("attention/", "context parallelism: mask, layout, plan, exchanges, kernels"), ("config/", "TOML, checks")],
    ),
]
WIDTH, FLOOR, LEFT = 1180, 74, 20

STEPS = [
    ("curriculum", "the stage", "length, RoPE, cp, mixture"),
    ("data", "a step's sequences", "by the global cursor"),
    ("attention.plan", "a plan per micro-batch", "layout, tiles, messages"),
    ("training/model", "forward, backward", "tokens [B, S/cp]"),
    ("attention", "exchange, kernels", "out [B, S/cp, Hq/tp, D]"),
    ("optim.loss", "a sum and a count", "divided once, over all ranks"),
    ("health", "is the step sound?", "one vector per rank"),
    ("optim", "clip and update", "or skip, roll back, halt"),
    ("metrics · evaluation", "record, look", "changes nothing"),
    ("checkpoint", "save", "beside training"),
]


def text(x: float, y: float, words: str, size: int, color: str = INK, weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="middle" fill="{color}" '
        f'font-weight="{weight}">{words}</text>'
    )


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{color}" '
        f'stroke="{SOFT}" stroke-width="0.8"/>'
    )


def page(width: float, height: float, body: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>', *body, "</svg>\n"])


def house() -> str:
    body = []
    for number, (color, rooms) in enumerate(FLOORS):
        y, width = 16 + number * (FLOOR + 14), (WIDTH - 2 * LEFT - 8 * (len(rooms) - 1)) / len(rooms)
        for place, (name, about) in enumerate(rooms):
            x = LEFT + place * (width + 8)
            body.append(box(x, y, width, FLOOR, color))
            body.append(text(x + width / 2, y + 32, name, 16, weight="bold"))
            body.append(text(x + width / 2, y + 54, about, 11 if len(rooms) > 4 else 13))
    return page(WIDTH, 16 + len(FLOORS) * (FLOOR + 14), body)


def batch() -> str:
    width, gap, row = 208, 22, 110
    body = []
    for number, (room, what, about) in enumerate(STEPS):
        line, place = divmod(number, 5)
        x, y = 20 + (place if line == 0 else 4 - place) * (width + gap), 20 + line * (row + 40)
        body.append(box(x, y, width, row, "#eef3f6"))
        body.append(text(x + width / 2, y + 30, f"{number + 1}. {what}", 15, weight="bold"))
        body.append(text(x + width / 2, y + 58, room, 13, color="#3b6ea8"))
        body.append(text(x + width / 2, y + 84, about, 12, color=SOFT))
        if place < 4:
            tip = x + width + gap - 4 if line == 0 else x - gap + 4
            start = x + width + 2 if line == 0 else x - 2
            body.append(arrow(start, y + row / 2, tip, y + row / 2))
        elif line == 0:
            body.append(arrow(x + width / 2, y + row + 2, x + width / 2, y + row + 36))
    return page(20 + 5 * (width + gap), 2 * row + 80, body)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    across = x1 != x2
    back = 7 if (x2 > x1 or y2 > y1) else -7
    points = (
        [(x2, y2), (x2 - back, y2 - 5), (x2 - back, y2 + 5)]
        if across
        else [(x2, y2), (x2 - 5, y2 - 7), (x2 + 5, y2 - 7)]
    )
    tip = " ".join(f"{x:g},{y:g}" for x, y in points)
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-width="1.6"/>'
        f'<polygon points="{tip}" fill="{INK}"/>'
    )


if __name__ == "__main__":
    (FOLDER / "house.svg").write_text(house())
    (FOLDER / "batch.svg").write_text(batch())
