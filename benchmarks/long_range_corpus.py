"""`python -m benchmarks.long_range_corpus OUT.jsonl` writes text whose keys can be predicted from far back.

A document has a few names, letters from A to Z, each with a key of its own, a small letter, and dots between them:
`..Qa....Rb..Qa...Qa......Rb`. The first key of a name in a sequence cannot be predicted; all later ones repeat it. The
distance from a name to its next occurrence is log-uniform, so a model gains with each doubling of the context it can
use, and its loss at far positions shows how far that is. After associative recall (Arora et al., 2023) and RULER (Hsieh
et al., 2024); [evaluation.passkey] asks in the same form with needle = question = "{name:.1}{word:.1}".
"""

import argparse
import heapq
import json
import random
import sys
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

DOCUMENT_CHARACTERS = 1 << 14


def document(names: int, longest: int, seed: int) -> str:
    """A document's text.

    Args:
        names: how many it has; with few of the 26, letters stay free for what is planted in a prompt.
        longest: largest distance from a name to its next occurrence, in characters.
        seed: of names, keys and distances.
    """
    draw = random.Random(seed)
    due = [
        (draw.random() * longest, name + draw.choice(ascii_lowercase)) for name in draw.sample(ascii_uppercase, names)
    ]
    heapq.heapify(due)
    pieces, place = [], 0
    while place < DOCUMENT_CHARACTERS:
        piece = "."
        if due[0][0] <= place:
            piece = due[0][1]
            heapq.heapreplace(due, (place + 2 * (longest / 2) ** draw.random(), piece))
        pieces.append(piece)
        place += len(piece)
    return "".join(pieces)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_range_corpus", description=__doc__)
    parser.add_argument("out", type=Path, help="file to write, for source = 'jsonl'")
    parser.add_argument("--documents", type=int, default=512, help="of 16,384 characters each (default 512)")
    parser.add_argument("--names", type=int, choices=range(1, 27), default=13, help="of a document (default 13)")
    parser.add_argument("--longest", type=int, default=512, help="largest distance, in characters (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default 0)")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as out:
        for number in range(options.documents):
            text = document(options.names, options.longest, options.seed * options.documents + number)
            out.write(json.dumps({"text": text}) + "\n")
    print(f"{options.out}: {options.documents:,} documents")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
