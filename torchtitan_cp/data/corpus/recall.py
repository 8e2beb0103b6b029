"""Synthetic text for associative recall: names with keys, planted in real text and repeated far apart.

A name is a capital letter, and the small letter after it is its key: `def reQaad(self, nVcumber):Qa`. In a document
each name has one key. Its first mention cannot be predicted; every later one repeats the key, so the loss falls only as
far back as a model finds the earlier mention. After associative recall (Arora et al., 2023) and RULER (Hsieh et al.,
2024).
"""

import heapq
import random
from collections.abc import Iterator
from itertools import cycle, islice
from string import ascii_lowercase, ascii_uppercase

# Characters of a document, names in it, documents made of a file, and the power of `plant_names`. Of 26 names some are
# left for prompts to plant. Short documents are many, as a model learns to recall on near repetitions first: with long
# ones alone that takes longer. The long one prefers far repetitions, most of which a shorter sequence cuts.
DOCUMENTS = ((128, 6, 14, 1.0), (512, 10, 2, 1.0), (2048, 20, 1, 0.5))
NEAREST = 2  # characters from a name to its next mention


def recall_documents(text: str, seed: str) -> Iterator[str]:
    """The documents made of a text, some 5,000 characters however long it is.

    Args:
        text: what names and keys are planted in, not empty.
        seed: of everything that is drawn.
    """
    draw = random.Random(seed)  # of a string, so that it is the same in every process
    for characters, names, count, power in DOCUMENTS:
        for _ in range(count):
            yield plant_names(text, characters, names, draw, power)


def plant_names(text: str, characters: int, names: int, draw: random.Random, power: float = 1.0) -> str:
    """A document of so many characters, from a random place of the text on.

    Its names come first near its beginning. The distance from a name to its next mention is log-uniform up to half of
    the document, or prefers far ones.

    Args:
        names: how many it has, up to 26.
        power: of the uniform number in the exponent; below 1, far distances are preferred.
    """
    start = draw.randrange(len(text))
    filler = cycle(islice(cycle(text), start, start + len(text)))
    due = [
        (draw.random() * 3 * names, name + draw.choice(ascii_lowercase)) for name in draw.sample(ascii_uppercase, names)
    ]
    heapq.heapify(due)
    pieces, place = [], 0
    while place < characters:
        if due[0][0] <= place:
            piece = due[0][1]
            distance = NEAREST * (characters / 2 / NEAREST) ** draw.random() ** power
            heapq.heapreplace(due, (place + distance, piece))
        else:
            piece = next(filler)
        pieces.append(piece)
        place += len(piece)
    return "".join(pieces)
