"""One pass over a source: documents to tokens, both splits at once, in batches that keep the tokenizer's cores busy.

While one batch is tokenized, the next is read. A journal of the pass lies beside the tokens: a pass that was killed
goes on from its last commit, and its result is the same bit for bit.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchtitan_cp.config.sections import SourceKeys
from torchtitan_cp.data.corpus.documents import Corpus, Document, Place
from torchtitan_cp.data.corpus.groups import Groups
from torchtitan_cp.data.corpus.manifest import FORMAT_VERSION, Manifest, file_sizes
from torchtitan_cp.data.corpus.progress import PassProgress
from torchtitan_cp.data.corpus.skipped_records import SkippedRecords
from torchtitan_cp.data.corpus.statistics import LengthStatistics, SourceStatistics
from torchtitan_cp.data.corpus.store import TokenStore, TokenWriter
from torchtitan_cp.data.corpus.tokenizer import Tokenizer
from torchtitan_cp.data.errors import DataError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

SPLITS = ("train", "validation")
UNIGRAM_FILE = "unigram.npy"
JOURNAL_FILE = "journal.json"
PIECE_CHARACTERS = 1 << 20
BATCH_CHARACTERS = 16 << 20
COMMIT_TOKENS = 32 << 20  # 64 or 128 MB on disk, a part of a shard: the most that a killed pass does again


def training_texts(corpora: Iterable[Corpus]) -> Iterator[str]:
    """The text of every document that is not held out. Names no rejects: the pass that tokenizes does."""
    for corpus in corpora:
        with PassProgress("reading text to train a tokenizer on", corpus.size_bytes) as progress:
            for document in corpus.documents(SkippedRecords(quiet=True)):
                progress.update(document.read_bytes)
                if isinstance(document.content, str) and not document.held_out:
                    yield document.content


def write_splits(corpus: Corpus, tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> Manifest:
    """Tokenize a corpus into `folder`, from where a pass that was killed there left off.

    Every document ends with the tokenizer's eos_id, each part of a split one too.

    Args:
        settings: kept in the manifest.

    Returns:
        the manifest of the folder, not yet written.

    Raises:
        DataError: the corpus holds no document, a split that is wanted holds none, or token ids of the corpus are
            not this tokenizer's.
    """
    writer = _SplitsWriter(corpus.source, tokenizer, folder, settings)
    writer.resume()
    skipped_records = SkippedRecords()
    documents = islice(corpus.documents(skipped_records, writer.place), writer.taken, None)
    with PassProgress("tokenizing", corpus.size_bytes) as progress:
        for document, ids in _tokenize(documents, tokenizer):
            writer.write(document, ids)
            progress.update(document.read_bytes)
    if skipped_records.counts:
        logger.warning("skipped in the corpus: %s", skipped_records.summary())
    content = writer.close(skipped_records)
    train, held_out = writer.writers
    return Manifest(
        format_version=FORMAT_VERSION,
        settings=settings,
        corpus_fingerprint=corpus.fingerprint(),
        tokenizer_fingerprint=tokenizer.fingerprint,
        content_fingerprint=content,
        vocab_size=tokenizer.vocab_size,
        documents={"train": train.documents, "validation": held_out.documents},
        tokens={"train": train.tokens, "validation": held_out.tokens},
        file_bytes=file_sizes(folder),
    )


class _SplitsWriter:
    """Documents into both splits, by the source's rules of length. A class, because a pass has state to go on from.

    Attributes:
        place, taken: where reading goes on: at this place of the corpus, after so many documents.
        writers: of `train` and `validation`.
    """

    def __init__(self, source: SourceKeys, tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> None:
        self.source, self.tokenizer, self.folder, self.settings = source, tokenizer, folder, settings
        self._start_over()

    def _start_over(self) -> None:
        self.place, self.taken = Place(), 0
        self.writers = [TokenWriter(self.folder, split, self.tokenizer.vocab_size) for split in SPLITS]
        self.groups = Groups(self.folder)
        self.left_out_documents = self.left_out_tokens = self.split_documents = 0
        self._committed_tokens = 0

    def resume(self) -> None:
        """Take up what is in the folder, if a killed pass left a journal there that its files bear out."""
        journal = read_journal(self.folder)
        damage = self._restore(journal) if journal else ""
        if journal is None or damage:
            if damage:
                logger.warning("the half-made tokens in %s are damaged (%s); they are made again", self.folder, damage)
            for path in self.folder.iterdir():
                path.unlink()
            self._start_over()
            return
        documents = sum(writer.documents for writer in self.writers)
        logger.info("going on after %d documents, %d tokens", documents, self._committed_tokens)

    def _restore(self, journal: dict[str, Any]) -> str:
        self.place, self.taken = Place(**journal["place"]), journal["taken"]
        self.left_out_documents, self.left_out_tokens, self.split_documents = journal["lengths"]
        problems = [writer.restore(state) for writer, state in zip(self.writers, journal["splits"], strict=True)]
        self._committed_tokens = self._tokens
        return next(filter(None, [*problems, self.groups.restore(journal["groups"])]), "")

    @property
    def _tokens(self) -> int:
        return sum(writer.tokens for writer in self.writers)

    def write(self, document: Document, ids: np.ndarray) -> None:
        """Add one document of tokens `[n]`, without its end."""
        if document.place.file != self.place.file:
            self.place, self.taken = document.place, 0
        self.taken += 1
        if len(ids) + 1 < self.source.min_document:
            self.left_out_documents += 1
            self.left_out_tokens += len(ids) + 1
        else:
            self._write_parts(self.writers[document.held_out], ids, self.groups.number(document.group))
        if self._tokens - self._committed_tokens >= COMMIT_TOKENS:
            self._commit()

    def _write_parts(self, writer: TokenWriter, ids: np.ndarray, group: int) -> None:
        """The document whole or in even parts, each ended."""
        most = self.source.max_document - 1 if self.source.max_document else max(1, len(ids))
        parts = -(-len(ids) // most)
        self.split_documents += parts > 1
        end = np.array([self.tokenizer.eos_id], dtype=ids.dtype)
        for part in np.array_split(ids, max(1, parts)):
            writer.append(part)
            writer.append(end)
            writer.end_document(group)

    def _commit(self) -> None:
        """Bring everything to disk, then the journal that says so."""
        journal = {
            "settings": self.settings,
            "place": asdict(self.place),
            "taken": self.taken,
            "lengths": [self.left_out_documents, self.left_out_tokens, self.split_documents],
            "splits": [writer.commit() for writer in self.writers],
            "groups": self.groups.commit(),
        }
        partial = self.folder / (JOURNAL_FILE + ".partial")
        partial.write_text(json.dumps(journal), encoding="utf-8")
        os.replace(partial, self.folder / JOURNAL_FILE)
        self._committed_tokens = self._tokens

    def close(self, skipped_records: SkippedRecords) -> str:
        """Finish the files. Returns the sha256 (hex) of what they hold.

        Raises:
            DataError: a split that is wanted holds no document.
        """
        self._refuse_empty_split()
        self.groups.commit()
        digests = [writer.close() for writer in self.writers]
        np.save(self.folder / UNIGRAM_FILE, self.writers[0].unigram_counts)
        train, held_out = (
            LengthStatistics.of(TokenStore(self.folder, split, self.tokenizer.vocab_size).document_lengths)
            for split in SPLITS
        )
        SourceStatistics(
            train,
            held_out,
            self.left_out_documents,
            self.left_out_tokens,
            self.split_documents,
            dict(skipped_records.counts),
        ).write(self.folder)
        (self.folder / JOURNAL_FILE).unlink(missing_ok=True)
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def _refuse_empty_split(self) -> None:
        where, fraction = self.source.where, self.source.validation_fraction
        train, held_out = (writer.documents for writer in self.writers)
        if train + held_out == 0:
            raise DataError(
                f"all {self.left_out_documents} documents are shorter than {where}.min_document = "
                f"{self.source.min_document} tokens",
                fix="lower min_document",
            )
        if train == 0:
            raise DataError(
                f"{where}.validation_fraction = {fraction} holds out all {held_out} documents, and none is left to "
                "train on",
                fix=f"lower {where}.validation_fraction, or split the text into more files",
            )
        if fraction > 0 and held_out == 0:
            raise DataError(
                f"{where}.validation_fraction = {fraction} holds out none of the {train} documents",
                fix=f"raise {where}.validation_fraction, split the text into more files, or set it to 0 to validate on "
                "nothing",
            )


def read_journal(folder: Path) -> dict[str, Any] | None:
    """The journal of a pass that was killed in the folder; None where there is none that can be read."""
    try:
        journal = json.loads((folder / JOURNAL_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return journal if isinstance(journal, dict) else None


class _Piece(NamedTuple):
    content: str | np.ndarray
    document: Document
    ends_document: bool


def _tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its token ids `[n]` int32, without its end."""

    def encode(batch: list[_Piece]) -> list[tuple[_Piece, np.ndarray]]:
        rows = iter(tokenizer.encode_batch([piece.content for piece in batch if isinstance(piece.content, str)]))
        return [
            (piece, next(rows) if isinstance(piece.content, str) else _given_ids(piece.document, tokenizer))
            for piece in batch
        ]

    parts: list[np.ndarray] = []
    for batch in _ahead(encode, _batches(_pieces(documents))):
        for piece, ids in batch:
            parts.append(ids)
            if piece.ends_document:
                yield piece.document, np.concatenate(parts) if len(parts) > 1 else ids
                parts = []


def _given_ids(document: Document, tokenizer: Tokenizer) -> np.ndarray:
    """A document that came as tokens `[n]`, int32, without an end of its own."""
    ids = document.content
    assert isinstance(ids, np.ndarray), "text goes to the tokenizer"
    if ids.max() >= tokenizer.vocab_size:
        raise DataError(
            f"{document.key} holds the token id {ids.max()}, and the tokenizer has {tokenizer.vocab_size} pieces",
            fix="set tokenizer.kind and tokenizer.path to the tokenizer that made the ids",
        )
    return (ids[:-1] if ids[-1] == tokenizer.eos_id else ids).astype(np.int32)


def _ahead(function: Callable[[Item], Result], items: Iterator[Item]) -> Iterator[Result]:
    """function(item) of each in order; while one is worked on in a thread, the next is taken."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting: Future[Result] | None = None
        for item in items:
            coming = thread.submit(function, item)
            if waiting:
                yield waiting.result()
            waiting = coming
        if waiting:
            yield waiting.result()


def _pieces(documents: Iterable[Document]) -> Iterator[_Piece]:
    """Documents in order, long ones cut, so that memory does not follow the longest one through the tokenizer.

    A cut stands after a newline where there is one, for no usual tokenizer joins text across the end of a line.
    """
    for document in documents:
        content, start = document.content, 0
        while isinstance(content, str) and len(content) - start > PIECE_CHARACTERS:
            stop = start + PIECE_CHARACTERS
            stop = content.rfind("\n", start, stop) + 1 or stop
            yield _Piece(content[start:stop], document, False)
            start = stop
        yield _Piece(content[start:], document, True)


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in order, together until a batch holds BATCH_CHARACTERS."""
    batch: list[_Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.content)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
