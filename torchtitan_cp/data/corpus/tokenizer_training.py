"""Trains a tokenizer on the corpus: byte-pair encoding by SentencePiece."""

import io
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import sentencepiece

from torchtitan_cp.config.sections import MIN_PIECES
from torchtitan_cp.data.corpus.store import replace_file
from torchtitan_cp.data.errors import DataError

SAMPLE_CHARACTERS = 32 << 20
LINE_CHARACTERS = 1000  # at 4 bytes each below SentencePiece's max_sentence_length; it drops longer lines


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a vocabulary and write it as a lossless SentencePiece model.

    Unseen characters become bytes, whitespace is kept as it is, and a newline or tab is a piece of its own, so decoding
    returns the exact text. The same texts give the same file.
    Source: Sennrich et al. 2016 (arXiv:1508.07909); Kudo and Richardson 2018 (arXiv:1808.06226).

    Args:
        texts: to train on; of a large corpus an evenly spread sample of its lines is used.
        vocab_size: V, with the 256 bytes and the end-of-text token.
        path: the model file, written whole or not at all.

    Raises:
        DataError: the texts are too few or empty, or V is less than their number of characters.
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
            num_threads=1,  # it is written into the model file; byte-pair training has one thread anyway
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain(str(error), vocab_size) from error
    replace_file(path, model.getvalue())


def _explain(message: str, vocab_size: int) -> DataError:
    """The error for a message of SentencePiece."""
    if most := re.search(r"too high.*<= (\d+)", message):
        return DataError(
            f"the corpus is too small for a tokenizer of tokenizer.vocab_size = {vocab_size} pieces",
            fix=(f"set tokenizer.vocab_size to at most {most[1]}, " if int(most[1]) >= MIN_PIECES else "")
            + "give more text, or set tokenizer.kind = 'bytes'",
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return DataError(
            f"tokenizer.vocab_size = {vocab_size} is less than the number of characters in the corpus",
            fix=f"set tokenizer.vocab_size to {int(least[1]) + 1} or more",
        )
    if "sentences_.empty()" in message:
        return DataError("the corpus holds only whitespace: no tokenizer can be trained on it", fix="check data.path")
    return DataError(f"SentencePiece could not train a tokenizer: {message}", fix="give a model with tokenizer.path")


def sample_lines(texts: Iterable[str], most_characters: int) -> list[str]:
    """An evenly spread sample of the non-blank lines.

    Every n-th line is kept; when the kept lines exceed the limit, every other one is dropped and n doubles. So the size
    of the corpus need not be known, and memory holds no more than the limit.

    Args:
        most_characters: of all lines returned; at least one line is returned.
    """
    kept, characters, stride = list[str](), 0, 1
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
    for line in chain.from_iterable(text.split("\n") for text in texts):
        if line and not line.isspace():
            yield from (line[start : start + LINE_CHARACTERS] for start in range(0, len(line), LINE_CHARACTERS))
