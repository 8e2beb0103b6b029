"""`python -m torchtitan_cp.evaluation.synthetic OUT.jsonl` writes text in which keys are bound early and asked for late.

A document is a row of records such as `QX7142`: a name of two letters and its key. Each name comes twice, first with
a new key, which nothing foretells, then with the same key again, which only the first tells. The distance between the
two is drawn log-uniformly, so a model gains with each doubling of the context that it can use, and by how much its
loss falls at far positions says how far it looks. Source: associative recall (Arora et al., 2023) and RULER (Hsieh et
al., 2024), in text.
"""

import argparse
import heapq
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase

NAMES = [first + second for first in ascii_uppercase for second in ascii_uppercase]
DOCUMENT_CHARACTERS = 1 << 14


def records(characters: int, digits: int, longest: int, seed: int) -> Iterator[str]:
    """The records of one document, each with a space after it.

    Args:
        characters: length of the document; the last record may go over it.
        digits: of a key.
        longest: largest distance, in characters, between a name's two records.
        seed: of names, keys and distances.
    """
    draw = random.Random(seed)
    names = draw.sample(NAMES, len(NAMES))  # taken in turn, so that a name comes back as late as can be
    waiting: list[tuple[float, str]] = []
    size, bound = 3 + digits, 0
    for place in range(0, characters, size):
        if waiting and waiting[0][0] <= place:
            yield heapq.heappop(waiting)[1]
            continue
        record = f"{names[bound % len(names)]}{draw.randrange(10**digits):0{digits}} "
        heapq.heappush(waiting, (place + size * (longest / size) ** draw.random(), record))
        bound += 1
        yield record


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m torchtitan_cp.evaluation.synthetic", description=__doc__)
    parser.add_argument("out", type=Path, help="JSON lines file to write, for source = 'jsonl'")
    parser.add_argument("--megabytes", type=float, default=4.0, help="size (default 4)")
    parser.add_argument("--digits", type=int, default=4, help="of a key (default 4)")
    parser.add_argument("--longest", type=int, default=1024, help="largest distance in characters (default 1024)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default 0)")
    options = parser.parse_args(arguments)
    documents = max(1, round(options.megabytes * 1e6 / DOCUMENT_CHARACTERS))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as out:
        for number in range(documents):
            seed = options.seed * documents + number
            text = "".join(records(DOCUMENT_CHARACTERS, options.digits, options.longest, seed))
            out.write(json.dumps({"text": text}) + "\n")
    print(f"{options.out}: {documents:,} documents of {DOCUMENT_CHARACTERS:,} characters")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
