"""Learning a tokenizer from the corpus, for a run that brings none: byte-pair encoding by SentencePiece."""

import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from torchtitan_cp.data.errors import DataError

RECIPE_VERSION = 1
SAMPLE_CHARACTERS = 32 << 20
LINE_CHARACTERS = 1000  # at 4 bytes each below SentencePiece's max_sentence_length; it drops longer lines


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Learn a vocabulary and write it as a SentencePiece model that loses nothing.

    Bytes stand in for unseen characters, whitespace is kept as it is, and a newline or tab is a piece of its own,
    so that text comes back exactly. The same texts give the same file.
    Source: Sennrich et al. 2016 (arXiv:1508.07909); Kudo and Richardson 2018 (arXiv:1808.06226).

    Args:
        texts: what to learn from; where there is much, an evenly spread part of its lines is used.
        vocab_size: V, pieces with the 256 bytes and the end-of-text token.
        path: model file; appears whole or not at all.

    Raises:
        DataError: the texts are too few for so many pieces, or hold nothing, or too many characters for so few.
    """
    model = io.BytesIO()
    lines = sample_lines(texts, SAMPLE_CHARACTERS)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", "\t"],
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,  # stands in the model file; byte-pair training has one thread anyway
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain(str(error), vocab_size) from error
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(model.getvalue())
    os.replace(partial, path)


def _explain(message: str, vocab_size: int) -> DataError:
    """SentencePiece's complaint in our words."""
    if most := re.search(r"too high.*<= (\d+)", message):
        return DataError(
            f"the corpus is too small for a tokenizer of tokenizer.vocab_size = {vocab_size} pieces",
            fix=f"set tokenizer.vocab_size to at most {most[1]}, give more text, or set tokenizer.kind = 'bytes'",
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return DataError(
            f"tokenizer.vocab_size = {vocab_size} is less than the characters the corpus is written in",
            fix=f"set tokenizer.vocab_size to {int(least[1]) + 1} or more",
        )
    if "sentences_.empty()" in message:
        return DataError("the corpus holds only whitespace: no tokenizer can be trained on it", fix="check data.path")
    return DataError(f"SentencePiece could not train a tokenizer: {message}", fix="give a model with tokenizer.path")


def sample_lines(texts: Iterable[str], most_characters: int) -> list[str]:
    """Lines of the texts, blank ones left out, thinned evenly until they fit.

    Every n-th line is kept; when the kept ones outgrow the limit, every other of them goes and n doubles. So neither
    the corpus's size need be known nor more than the limit be held.

    Args:
        most_characters: of all lines returned; one line is returned in any case.
    """
    kept: list[str] = []
    characters, stride = 0, 1
    for index, line in enumerate(_lines(texts)):
        if index % stride:
            continue
        kept.append(line)
        characters += len(line)
        while characters > most_characters and len(kept) > 1:
            kept, stride = kept[::2], stride * 2
            characters = sum(map(len, kept))
    return kept


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            if line and not line.isspace():
                yield from (line[start : start + LINE_CHARACTERS] for start in range(0, len(line), LINE_CHARACTERS))
