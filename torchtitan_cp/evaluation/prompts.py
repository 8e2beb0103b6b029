"""Prompts that hide their answer far above the question, as tokens: passkeys, several keys, chains of variables.

Source: passkey retrieval (Mohtashami and Jaggi, 2023); several keys and variable tracking after RULER (Hsieh et al.,
2024), as is the wording. The answer is part of the prompt (teacher forcing): it counts as right if each of its tokens
is the most likely one after those before it.
"""

from collections.abc import Callable
from itertools import pairwise
from string import ascii_lowercase, ascii_uppercase, digits
from typing import NamedTuple

import numpy as np

from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.config.sections import Passkey

CHARACTERS = {"name": (ascii_uppercase, 5), "key": (digits, 7), "word": (ascii_lowercase, 7)}
MAX_DRAWS = 100
HOPS = 4
ASSIGNMENT, COPY = " VAR {name} = {value}. ", " VAR {name} = VAR {other}. "
CHAIN_QUESTION = (
    " Question: Find all variables that are assigned the value {value} in the text above. Answer: They are:"
)
Secret = dict[str, str]  # a `name`, and its key as digits (`key`) and as letters (`word`)
PlantedText = tuple[list[str], str, str]  # needles, question, answer


class Prompt(NamedTuple):
    """A prompt and its answer.

    Attributes:
        tokens: `[L]` int64.
        labels: `[L]` int64, the next token where it belongs to the answer, else IGNORED.
    """

    tokens: np.ndarray
    labels: np.ndarray


class Frame(NamedTuple):
    """What a chat template writes around a user's text; for plain text BOS alone, if any.

    Attributes:
        opening: `[n]` token ids before it.
        closing: text after it, to the beginning of the assistant's turn.
        special: `[n]` token ids that are left out of the filler, since they would end the user's turn.
    """

    opening: np.ndarray = np.empty(0, np.int64)
    closing: str = ""
    special: np.ndarray = np.empty(0, np.int64)


class PromptWriter:
    """Writes prompts from filler text. A prompt depends on its arguments, its number and the frame only.

    Args:
        encode: gives the tokens of a text, with the special tokens of a frame.
        filler: (number of the prompt, count) -> tokens of real text, `[count]`.
        settings: [evaluation.passkey].

    Attributes:
        frame: around text and question; the answer follows it.
    """

    def __init__(
        self, encode: Callable[[str], np.ndarray], filler: Callable[[int, int], np.ndarray], settings: Passkey
    ) -> None:
        self.encode, self.filler, self.settings = encode, filler, settings
        self.frame = Frame()

    def write(self, variant: str, length: int, depth: float, number: int) -> Prompt | None:
        """A prompt of exactly `length` tokens; None if needles, question, answer and frame are longer.

        Args:
            variant: one of VARIANTS.
            depth: of the needle that is asked for, from 0 at the top to 1 just above the question.
            number: seeds names, keys and filler.
        """
        draw = np.random.default_rng([number, length])
        opening, closing, special = self.frame
        filler = self.filler(number, length)
        filler = np.resize(filler[~np.isin(filler, special)], length)
        texts, question, answer = VARIANTS[variant](self, draw, filler)
        needles = [self._encode_behind("\n", text) for text in texts]
        # Behind a header, an answer begins without a space.
        question, answer = question + closing, answer.lstrip() if closing else answer
        asked = self._encode_behind("\n", question + answer)
        answered = self._encode_behind("\n" + question, answer)
        room = length - sum(map(len, (opening, *needles, asked)))
        if room < 0:
            return None
        others = draw.random(len(needles) - 1)
        if variant == "variable_tracking":  # the chain goes on below its first assignment, in order
            others = np.sort(depth + (1 - depth) * others)
        places = [round(each * room) for each in (depth, *others)]
        pieces, before = [opening], 0
        for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
            pieces += [filler[before:place], needle]
            before = place
        tokens = np.concatenate([*pieces, filler[before:room], asked]).astype(np.int64)
        labels = np.full(length, IGNORED, dtype=np.int64)
        labels[-len(answered) - 1 : -1] = answered
        return Prompt(tokens, labels)

    def ask(self, secret: Secret) -> tuple[str, str]:
        """The question, and the answer with the space before it."""
        question = self.settings.question.format(name=secret["name"], key="", word="").rstrip()
        return question, self.settings.question.format(**secret)[len(question) :]

    def draw_secrets(self, draw: np.random.Generator, filler: np.ndarray, count: int) -> list[Secret]:
        """Secrets whose names differ in their first letters and, if possible, do not occur in the filler."""
        found: list[Secret] = []
        for attempt in range(MAX_DRAWS * count):
            secret = {
                part: "".join(characters[place] for place in draw.integers(0, len(characters), size))
                for part, (characters, size) in CHARACTERS.items()
            }
            occurs = attempt < MAX_DRAWS and self._occurs(self.ask(secret)[0], filler)
            if not occurs and secret["name"][0] not in {other["name"][0] for other in found}:
                found.append(secret)
            if len(found) == count:
                break
        return found

    def _encode_behind(self, before: str, text: str) -> np.ndarray:
        """The tokens of a text where it follows another; by itself, some tokenizers put a space before it."""
        both, first = self.encode(before + text), self.encode(before)
        same = np.append(both[: len(first)] == first[: len(both)], False)
        return both[same.argmin() :]

    def _occurs(self, text: str, filler: np.ndarray) -> bool:
        tokens = self._encode_behind("\n", text)
        if not 0 < len(tokens) <= len(filler):
            return False
        return bool((np.lib.stride_tricks.sliding_window_view(filler, len(tokens)) == tokens).all(1).any())


def _passkey(writer: PromptWriter, draw: np.random.Generator, filler: np.ndarray, count: int = 1) -> PlantedText:
    secrets = writer.draw_secrets(draw, filler, count)
    return [writer.settings.needle.format(**secret) for secret in secrets], *writer.ask(secrets[0])


def _variable_tracking(writer: PromptWriter, draw: np.random.Generator, filler: np.ndarray) -> PlantedText:
    secrets = writer.draw_secrets(draw, filler, HOPS + 1)
    names, value = [secret["name"] for secret in secrets], secrets[0]["key"]
    copies = [COPY.format(name=name, other=other) for other, name in pairwise(names)]
    chain = [ASSIGNMENT.format(name=names[0], value=value), *copies]
    return chain, CHAIN_QUESTION.format(value=value), "".join(f" {name}" for name in names)


VARIANTS: dict[str, Callable[[PromptWriter, np.random.Generator, np.ndarray], PlantedText]] = {
    "passkey": _passkey,
    "multi_key": lambda writer, draw, filler: _passkey(writer, draw, filler, writer.settings.keys),
    "variable_tracking": _variable_tracking,
}
