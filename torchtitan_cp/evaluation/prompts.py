"""Prompts whose answer was planted far above in them, as tokens: passkeys, several keys, chains of variables.

Source: passkey retrieval (Mohtashami and Jaggi, 2023); several keys and variable tracking after RULER (Hsieh et al.,
2024), which the wording is from. Prompts are teacher-forced: the answer stands in them, and is right where each of its
tokens is the most likely one after those before it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np

from torchtitan_cp.config.labels import IGNORED

NAME_LETTERS, KEY_CHARACTERS = 5, 7
MOST_DRAWS = 100
KINDS = ((ascii_uppercase, NAME_LETTERS), (digits, KEY_CHARACTERS), (ascii_lowercase, KEY_CHARACTERS))
HOPS = 4
ASSIGNMENT, COPY = " VAR {name} = {value}. ", " VAR {name} = VAR {other}. "
CHAIN_QUESTION = (
    " Question: Find all variables that are assigned the value {value} in the text above. Answer: They are:"
)


@dataclass(frozen=True)
class Secret:
    """What a needle tells: a name, and its key in digits or, as a wording may have it, in letters."""

    name: str
    key: str
    word: str


@dataclass(frozen=True)
class Wording:
    """How a key is told and asked for; see [evaluation.passkey], and config.check for what they must be.

    Args:
        needle: with {name}, and {key} or {word}.
        question: the same, and ends with the key or word.
    """

    needle: str
    question: str

    def tell(self, secret: Secret) -> str:
        """The needle."""
        return self.needle.format(**asdict(secret))

    def ask(self, secret: Secret) -> tuple[str, str]:
        """The question, and the answer with the space before it."""
        question = self.question.format(name=secret.name, key="", word="").rstrip()
        return question, self.question.format(**asdict(secret))[len(question) :]


@dataclass(frozen=True)
class Prompt:
    """A prompt and what is to be found in it.

    Attributes:
        tokens: `[L]` int64.
        labels: `[L]` int64, the next token where that belongs to the answer, else IGNORED.
    """

    tokens: np.ndarray
    labels: np.ndarray


class PromptWriter:
    """Makes prompts from filler text and a tokenizer. A prompt depends on the arguments and its number alone.

    Args:
        encode: a text's tokens.
        filler: (number of the prompt, count) -> tokens of real text, `[count]`.
        wording: of keys.
        keys: told in a prompt of several.
    """

    def __init__(
        self,
        encode: Callable[[str], np.ndarray],
        filler: Callable[[int, int], np.ndarray],
        wording: Wording,
        keys: int,
    ) -> None:
        self.encode, self.filler, self.wording, self.keys = encode, filler, wording, keys

    def write(self, variant: str, length: int, depth: float, number: int) -> Prompt | None:
        """A prompt of exactly `length` tokens; None where its question alone is longer.

        Args:
            variant: of VARIANTS.
            depth: of the needle that is asked for, 0 at the top to 1 just above the question.
            number: of the prompt, which draws its names, keys and filler.
        """
        draw = np.random.default_rng([number, length])
        filler = self.filler(number, length)
        needles, question, answer = VARIANTS[variant](self, draw, filler)
        planted = [self.encode(text) for text in needles]
        asked, told = (self.encode(text) for text in (question, answer))
        room = length - sum(map(len, planted)) - len(asked) - len(told)
        if room < 0:
            return None
        depths = _depths(variant, depth, len(planted), draw)
        places = [round(each * room) for each in depths]
        pieces, before = [], 0
        for place, needle in sorted(zip(places, planted, strict=True), key=lambda pair: pair[0]):
            pieces += [filler[before:place], needle]
            before = place
        tokens = np.concatenate([*pieces, filler[before:room], asked, told]).astype(np.int64)
        labels = np.full(length, IGNORED, dtype=np.int64)
        labels[-len(told) - 1 : -1] = told
        return Prompt(tokens, labels)

    def secrets(self, draw: np.random.Generator, filler: np.ndarray, count: int) -> list[Secret]:
        """With names that differ by their first letters too, and that the filler does not hold, as far as can be."""
        found: list[Secret] = []
        for tried in range(MOST_DRAWS * count):
            drawn = Secret(*(_letters(draw, *kind) for kind in KINDS))
            taken = tried < MOST_DRAWS and self._stands_in(self.wording.ask(drawn)[0], filler)
            if drawn.name[0] not in {other.name[0] for other in found} and not taken:
                found.append(drawn)
            if len(found) == count:
                break
        return found

    def _stands_in(self, text: str, filler: np.ndarray) -> bool:
        wanted = self.encode(text)
        if not 0 < len(wanted) <= len(filler):
            return False
        return bool((np.lib.stride_tricks.sliding_window_view(filler, len(wanted)) == wanted).all(1).any())


def _depths(variant: str, depth: float, count: int, draw: np.random.Generator) -> list[float]:
    """Where each needle goes: the first, which is asked for, at `depth`; a chain's others below it, in their order."""
    others = draw.random(count - 1)
    return [depth, *(sorted(depth + (1 - depth) * others) if variant == "variable_tracking" else others)]


Told = tuple[list[str], str, str]  # needles, question, answer


def _passkey(writer: PromptWriter, draw: np.random.Generator, filler: np.ndarray, count: int = 1) -> Told:
    secrets = writer.secrets(draw, filler, count)
    return [writer.wording.tell(secret) for secret in secrets], *writer.wording.ask(secrets[0])


def _multi_key(writer: PromptWriter, draw: np.random.Generator, filler: np.ndarray) -> Told:
    return _passkey(writer, draw, filler, writer.keys)


def _variable_tracking(writer: PromptWriter, draw: np.random.Generator, filler: np.ndarray) -> Told:
    secrets = writer.secrets(draw, filler, HOPS + 1)
    names, value = [secret.name for secret in secrets], secrets[0].key
    copies = [COPY.format(name=name, other=other) for other, name in pairwise(names)]
    chain = [ASSIGNMENT.format(name=names[0], value=value), *copies]
    return chain, CHAIN_QUESTION.format(value=value), "".join(f" {name}" for name in names)


def _letters(draw: np.random.Generator, kind: str, count: int) -> str:
    return "".join(kind[place] for place in draw.integers(0, len(kind), count))


VARIANTS: dict[str, Callable[[PromptWriter, np.random.Generator, np.ndarray], Told]] = {
    "passkey": _passkey,
    "multi_key": _multi_key,
    "variable_tracking": _variable_tracking,
}
