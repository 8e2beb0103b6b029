"""Tokens that are found in a text before the vocabulary splits it: special ones and others that were added."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before the vocabulary splits it, as in the `tokenizers` package.

    Attributes:
        content: its text.
        special: it is not read from a document's plain text, and not decoded.
        normalized: it is sought in the normalized text.
        lstrip, rstrip: it takes the whitespace before and after it.
        single_word: it is not read inside a word.
    """

    content: str
    special: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @property
    def pattern(self) -> str:
        """A regular expression for the texts of this token, without the whitespace before it."""
        text = re.escape(self.content)
        text = rf"(?<!\w){text}(?!\w)" if self.single_word else text
        return text + r"\s*" * self.rstrip

    @property
    def in_texts(self) -> list[str]:
        """Texts with this token in them, to try whether a vocabulary reads it from plain text.

        Empty unless it is a word between marks, as `<s>` is: a file may call an ordinary piece special, such as a
        newline, which documents need as it is.
        """
        content = self.content
        is_name = re.fullmatch(r"\W.*\w.*\W", content, re.DOTALL)
        return [content, f"a{content}a", f"a {content} a"] if is_name else []

    @property
    def first_character_pattern(self) -> str:
        """A regular expression for the first character of this token's text, where the rest follows."""
        first, rest = re.escape(self.content[0]), re.escape(self.content[1:])
        return rf"(?<!\w){first}(?={rest}(?!\w))" if self.single_word else f"{first}(?={rest})"


def token_starts(offsets: Iterable[tuple[int, int]]) -> np.ndarray:
    """The character at which each token begins, `[n]` int64, with those before it that are in no token.

    Args:
        offsets: (start, stop) of each token's characters.
    """
    edges = np.fromiter(chain.from_iterable(offsets), dtype=np.int64)
    return np.minimum(edges[::2], np.append(0, edges[1::2])[:-1])


def encode_around_tokens(
    texts: Sequence[str],
    literals: Mapping[AddedToken, list[int] | None],
    encode: Callable[[list[str], bool], list[tuple[ArrayLike, ArrayLike, int]]],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens of texts in which some tokens are found first, and what lies between them is encoded.

    As in the `tokenizers` package, normalized tokens are sought in what the others leave, and of those that begin at
    one character the longest is read.

    Args:
        literals: tokens to find, at least one, with the ids that each becomes; None: it is found, so that no part of it
            is, and stays text; no ids: the same, but the text is cut after its first character, so that the vocabulary
            does not read it.
        encode: (parts of text between them, whether they follow one) -> ids and starts of each part, and where its last
            token ends. What follows that end belongs to the next token.

    Returns:
        for each text its token ids, `[n]` int32, and the character at which each begins, `[n]` int64.
    """
    passes = [[token for token in literals if token.normalized == normalized] for normalized in (False, True)]
    patterns = list[tuple[re.Pattern[str], list[AddedToken]]]()
    for tokens in filter(None, passes):
        tokens.sort(key=lambda token: -len(token.content))
        patterns.append((re.compile("|".join(f"({token.pattern})" for token in tokens)), tokens))

    def split(text: str) -> list[tuple[int, str, list[int]]]:
        """Texts and, between them, ids of literals, each with its start; the first and the last are texts."""
        parts = [(0, text, list[int]())]
        for pattern, tokens in patterns:
            earlier, parts = parts, []
            for start, part, ids in earlier:
                parts += [(start, part, ids)] if ids else cut(start, part, pattern, tokens)
        return parts

    def cut(
        begin: int, text: str, pattern: re.Pattern[str], tokens: list[AddedToken]
    ) -> Iterator[tuple[int, str, list[int]]]:
        end = 0
        for match in pattern.finditer(text):
            token, start = tokens[(match.lastindex or 1) - 1], match.start()
            ids = literals[token]
            if ids is None:
                continue
            if not ids:
                yield begin + end, text[end : start + 1], []
                yield begin + start + 1, "", []
                end = start + 1
                continue
            while token.lstrip and end < start and text[start - 1].isspace():
                start -= 1
            yield begin + end, text[end:start], []
            yield begin + start, "", ids
            end = match.end()
        yield begin + end, text[end:], []

    rows = [split(text) for text in texts]
    first = iter(encode([parts[0][1] for parts in rows], False))
    later = iter(encode([part for parts in rows for _, part, _ in parts[2::2]], True))

    def joined(parts: list[tuple[int, str, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
        ids, starts, end = list[np.ndarray](), list[np.ndarray](), 0
        for index, (start, _, literal) in enumerate(parts):
            if index % 2:
                ids.append(np.asarray(literal, dtype=np.int32))
                starts.append(np.full(len(literal), end, dtype=np.int64))
            else:
                tokens, begins, length = next(later if index else first)
                ids.append(np.asarray(tokens, dtype=np.int32))
                starts.append(np.asarray(begins, dtype=np.int64) + start)
                end = start + length
        return np.concatenate(ids), np.concatenate(starts)

    return [joined(parts) for parts in rows]
