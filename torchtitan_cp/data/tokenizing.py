"""One pass over a corpus: documents to tokens, both splits at once, in batches that keep the tokenizer's cores busy."""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchtitan_cp.data.corpus import Corpus, Document
from torchtitan_cp.data.errors import DataError
from torchtitan_cp.data.manifest import FORMAT_VERSION, Manifest, file_sizes
from torchtitan_cp.data.progress import PassProgress
from torchtitan_cp.data.rejects import Rejects
from torchtitan_cp.data.store import TokenWriter
from torchtitan_cp.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

UNIGRAM_FILE = "unigram.npy"
PIECE_CHARACTERS = 1 << 20
BATCH_CHARACTERS = 16 << 20


def training_texts(corpus: Corpus) -> Iterator[str]:
    """The text of every document that is not held out. Names no rejects: the pass that tokenizes does."""
    with PassProgress("reading text to train a tokenizer on", corpus.size_bytes) as progress:
        for document in corpus.documents(Rejects(quiet=True)):
            progress.update(document.read_bytes)
            if not document.held_out:
                yield document.text


class _Piece(NamedTuple):
    text: str
    held_out: bool
    ends_document: bool
    read_bytes: int


def write_splits(corpus: Corpus, tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> Manifest:
    """Tokenize a corpus into `folder`. Every document ends with the tokenizer's eos_id.

    Args:
        settings: kept in the manifest.

    Returns:
        the manifest of the folder, not yet written.

    Raises:
        DataError: the corpus holds no document, or a split that is wanted holds none.
    """
    rejects = Rejects()
    train, held_out = (TokenWriter(folder, split, tokenizer.vocab_size) for split in ("train", "validation"))
    end = np.array([tokenizer.eos_id])
    with PassProgress("tokenizing", corpus.size_bytes) as progress:
        for batch in _batches(_pieces(corpus.documents(rejects))):
            for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
                writer = held_out if piece.held_out else train
                writer.append(ids)
                if piece.ends_document:
                    writer.append(end)
                    writer.end_document()
            progress.update(batch[-1].read_bytes)
    if rejects.counts:
        logger.warning("skipped in the corpus: %s", rejects.summary())
    _refuse_empty_split(train.documents, held_out.documents, corpus.data.validation_fraction)
    np.save(folder / UNIGRAM_FILE, train.unigram_counts)
    content = hashlib.sha256((train.close() + held_out.close()).encode()).hexdigest()
    return Manifest(
        format_version=FORMAT_VERSION,
        settings=settings,
        corpus_fingerprint=corpus.fingerprint(),
        tokenizer_fingerprint=tokenizer.fingerprint,
        content_fingerprint=content,
        vocab_size=tokenizer.vocab_size,
        documents={"train": train.documents, "validation": held_out.documents},
        tokens={"train": train.tokens, "validation": held_out.tokens},
        rejects=dict(rejects.counts),
        file_bytes=file_sizes(folder),
    )


def _refuse_empty_split(train_documents: int, held_out_documents: int, fraction: float) -> None:
    documents = train_documents + held_out_documents
    if train_documents == 0:
        raise DataError(
            f"data.validation_fraction = {fraction} holds out all {documents} documents, and none is left to train on",
            fix="lower data.validation_fraction, or split the text into more files",
        )
    if fraction > 0 and held_out_documents == 0:
        raise DataError(
            f"data.validation_fraction = {fraction} holds out none of the {documents} documents",
            fix="raise data.validation_fraction, split the text into more files, or set it to 0 to validate on nothing",
        )


def _pieces(documents: Iterable[Document]) -> Iterator[_Piece]:
    """Documents in order, long ones cut, so that memory does not follow the longest one through the tokenizer.

    A cut stands after a newline where there is one, for no usual tokenizer joins text across the end of a line.
    """
    for document in documents:
        text, start = document.text, 0
        while len(text) - start > PIECE_CHARACTERS:
            stop = start + PIECE_CHARACTERS
            stop = text.rfind("\n", start, stop) + 1 or stop
            yield _Piece(text[start:stop], document.held_out, False, document.read_bytes)
            start = stop
        yield _Piece(text[start:], document.held_out, True, document.read_bytes)


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in order, together until a batch holds BATCH_CHARACTERS."""
    batch: list[_Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
