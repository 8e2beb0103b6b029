"""Documents to token ids: conversations are written by their template, texts are tokenized, in batches and in order.

A thread reads the next batch while this process works on one. With several workers, other processes do that work, and
this one reads the corpus and gets the ids back in the corpus's order; so they change no byte of what is kept.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from torchtitan_cp.config.data import SourceKeys
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.chat import ChatTemplate, conversation_fields, read_conversation
from torchtitan_cp.data.corpus.records import BadRecordError, Document, SkippedRecords
from torchtitan_cp.data.corpus.store import token_dtype
from torchtitan_cp.data.corpus.tokenizer import Tokenizer, load_tokenizer, usable_cores, use_one_thread
from torchtitan_cp.data.errors import DataError

T = TypeVar("T")

FRAGMENT_CHARACTERS = 1 << 20
BATCH_CHARACTERS = max(4, usable_cores()) << 20  # a fragment for each core
CHAT_BATCH_CHARACTERS = 2 << 20  # offsets of tokens take 100 bytes a character until they are arrays
WORKER_BATCH_CHARACTERS = 1 << 20  # a fragment, as each worker has one thread
BATCHES_A_WORKER = 3  # read ahead, so that no worker waits for one whose batch takes longer

Row = Mapping[str, object]
# Consecutive text of a document, all its token ids, or its conversation; the document; whether the document ends here.
Fragment = tuple[str | np.ndarray | Row, Document, bool]
Content = str | np.ndarray | Row
Conversation = tuple[str, list[tuple[int, int]]]  # its text, and (start, stop) of the characters that are learned
Written = str | np.ndarray | Conversation | BadRecordError | DataError
# Ids `[n]`; of a conversation also the mask `[n]` bool of what is learned; or why there are none.
Encoded = np.ndarray | tuple[np.ndarray, np.ndarray] | BadRecordError | DataError


@dataclass(frozen=True)
class Encoder:
    """Makes the ids of batches. All contents of a source are conversations, or none; all are texts, or none.

    Attributes:
        template: writes the conversations of a source that holds them.
    """

    tokenizer: Tokenizer
    source: SourceKeys
    template: ChatTemplate | None

    def write(self, batch: Sequence[Content]) -> list[Written]:
        """The batch with its conversations as text."""
        return [self._write(content) if isinstance(content, Mapping) else content for content in batch]

    def _write(self, row: Row) -> Conversation | BadRecordError | DataError:
        assert self.template, "a source of conversations has a template"
        try:
            return read_conversation(row, self.source, self.template)
        except (BadRecordError, DataError) as error:  # raised where the conversation's place is known
            return error

    def encode(self, written: Sequence[Written]) -> list[Encoded]:
        """The ids of what `write` returned, in the dtype of the store. Ids of the corpus stay as they are."""
        dtype = token_dtype(self.tokenizer.vocab_size)
        texts = [entry for entry in written if isinstance(entry, str)]
        chats = [entry for entry in written if isinstance(entry, tuple)]
        ids = iter(self.tokenizer.encode_batch(texts) if texts else [])
        chat_ids = iter(self.tokenizer.encode_chat_batch([text for text, _ in chats]) if chats else [])

        def encode(entry: Written) -> Encoded:
            if isinstance(entry, str):
                return next(ids).astype(dtype)
            if isinstance(entry, tuple):
                tokens, starts = next(chat_ids)
                return tokens.astype(dtype), learned_tokens(starts, entry[1])
            return entry

        return [encode(entry) for entry in written]


def tokenize(
    documents: Iterable[Document], encoder: Encoder, skipped: SkippedRecords, settings: TokenizerConfig, workers: int
) -> Generator[tuple[Document, np.ndarray, np.ndarray | None], None, None]:
    """Each document with its token ids `[n]`, without the end token, and the mask `[n]` bool of a conversation.

    Args:
        skipped: counts the conversations that cannot be written or learned from.
        settings: by which other processes load the encoder's tokenizer.
        workers: processes; 1: this one, with the tokenizer's own threads.

    Raises:
        DataError: token ids are not of this tokenizer, a template does not say what is learned, or a process died.
    """
    parts, dtype = list[np.ndarray](), token_dtype(encoder.tokenizer.vocab_size)
    bos = np.array(encoder.tokenizer.bos_ids, dtype=dtype)
    if workers > 1 and not encoder.source.token_field:
        encoded = _encode_in_workers(documents, encoder, settings, workers)
    else:
        encoded = _encode_here(documents, encoder)
    for batch, results in encoded:
        for (content, document, ends_document), result in zip(batch, results, strict=True):
            if isinstance(result, BadRecordError | DataError):
                with skipped.skipping(document.where):
                    raise result
            elif isinstance(result, tuple):
                yield document, *result
            else:
                if not isinstance(content, str):
                    result = _checked_ids(result, document, encoder.tokenizer).astype(dtype)
                elif not parts:
                    parts.append(bos)
                parts.append(result)
                if ends_document:
                    whole, parts = np.concatenate(parts), []  # a long document's parts are not kept beside it
                    yield document, whole, None


def _encode_here(documents: Iterable[Document], encoder: Encoder) -> Iterator[tuple[list[Fragment], list[Encoded]]]:
    """Batches with their ids, made by this process. The thread that reads also writes conversations."""
    limit = BATCH_CHARACTERS if encoder.template is None else CHAT_BATCH_CHARACTERS
    batches = _batches(documents, limit)
    for batch, written in read_ahead((batch, encoder.write(_contents(batch, encoder.source))) for batch in batches):
        yield batch, encoder.encode(written)


def _encode_in_workers(
    documents: Iterable[Document], encoder: Encoder, settings: TokenizerConfig, workers: int
) -> Iterator[tuple[list[Fragment], list[Encoded]]]:
    """Batches with their ids, in order, made by other processes.

    Raises:
        DataError: one of them was killed.
    """
    batches = read_ahead(_batches(documents, WORKER_BATCH_CHARACTERS))
    waiting = deque[tuple[list[Fragment], Future[list[Encoded]]]]()
    try:
        with _worker_pool(encoder, settings, workers) as pool:
            for batch in batches:
                waiting.append((batch, pool.submit(_encode, _contents(batch, encoder.source))))
                if len(waiting) == BATCHES_A_WORKER * workers:
                    batch, future = waiting.popleft()
                    yield batch, future.result()
            while waiting:
                batch, future = waiting.popleft()
                yield batch, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"one of the {workers} processes that tokenize was killed, as the system does where memory is short",
            fix="use fewer, or free memory (--workers), then start again: what is tokenized is kept",
        ) from error


@contextmanager
def _worker_pool(encoder: Encoder, settings: TokenizerConfig, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that encode batches, started anew: a fork may inherit locks of the tokenizer's threads."""
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        _start_worker,
        (settings, encoder.source, encoder.template),
    )
    # Children inherit the mask, so that a terminal's Ctrl-C does not end them in a traceback; this process ends them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        try:
            for started in [pool.submit(_is_started) for _ in range(workers)]:
                started.result()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


_worker_encoder: Encoder | None = None  # of a worker process


def _start_worker(settings: TokenizerConfig, source: SourceKeys, template: ChatTemplate | None) -> None:
    """Make this process a worker."""
    global _worker_encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    use_one_thread(tokenizer := load_tokenizer(settings))
    _worker_encoder = Encoder(tokenizer, source, template)


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, which would wait for batches for ever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _is_started() -> bool:
    return _worker_encoder is not None


def _encode(batch: Sequence[Content]) -> list[Encoded]:
    assert _worker_encoder, "the pool starts each worker with one"
    return _worker_encoder.encode(_worker_encoder.write(batch))


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items in order; a thread takes the next one ahead. Its exceptions are raised here."""
    end = object()
    with ThreadPoolExecutor(max_workers=1) as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield cast(T, item)


def _checked_ids(ids: np.ndarray, document: Document, tokenizer: Tokenizer) -> np.ndarray:
    """The token ids of a document that holds them, `[n]`, without an end token."""
    if ids.max() >= tokenizer.vocab_size:
        raise DataError(
            f"{document.key} holds the token id {ids.max()}, but the tokenizer has {tokenizer.vocab_size} pieces",
            fix="set tokenizer.kind and tokenizer.path to the tokenizer that made the ids",
        )
    return ids[:-1] if ids[-1] == tokenizer.eos_id else ids


def learned_tokens(starts: np.ndarray, learned: Iterable[tuple[int, int]]) -> np.ndarray:
    """Which tokens contain a learned character, `[n]` bool.

    Args:
        starts: `[n]` int64, the character at which each token begins, ascending; see encode_chat_batch.
        learned: (start, stop) of the learned characters.
    """
    mask = np.zeros(len(starts), dtype=bool)
    for start, stop in learned if len(starts) else ():
        first = np.searchsorted(starts, starts[np.searchsorted(starts, start, side="right") - 1])
        mask[first : np.searchsorted(starts, stop)] = True
    return mask


def _contents(batch: Iterable[Fragment], source: SourceKeys) -> list[Content]:
    """What an encoder needs of the fragments: other columns of a row may not be for sending to a process."""
    needed = conversation_fields(source)
    return [
        {name: content[name] for name in needed if name in content} if isinstance(content, Mapping) else content
        for content, _, _ in batch
    ]


def _batches(documents: Iterable[Document], limit: int) -> Iterator[list[Fragment]]:
    """Fragments of the documents in order, in batches of at least `limit` characters.

    Long texts, but not conversations, are cut, so that the tokenizer's memory does not grow with the longest one. A
    cut follows a newline if there is one, because usual tokenizers do not join text across the end of a line.
    """
    batch, characters = list[Fragment](), 0
    for document in documents:
        for fragment in _fragments(document):
            batch.append(fragment)
            characters += _characters(fragment[0])
            if characters >= limit:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _fragments(document: Document) -> Iterator[Fragment]:
    content, start = document.content, 0
    if document.row is not None:
        yield document.row, document, True
        return
    while start < len(content):
        stop = len(content)
        if isinstance(content, str) and stop - start > FRAGMENT_CHARACTERS:
            stop = start + FRAGMENT_CHARACTERS
            stop = content.rfind("\n", start, stop) + 1 or stop
        yield content[start:stop], document, stop == len(content)
        start = stop


def _characters(content: object) -> int:
    """Characters of a text, or of all texts in a row; token ids of an array."""
    if isinstance(content, str | np.ndarray):
        return len(content)
    if isinstance(content, Mapping | list):
        return 1 + sum(map(_characters, content.values() if isinstance(content, Mapping) else content))
    return 1
