"""One pass over a source: its documents' tokens go to the files of both splits, in the corpus's order.

A journal beside the tokens says how far the pass is: after a kill, the next pass continues from its last commit, and
the result is the same bit for bit, by any number of workers.
"""

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from torchtitan_cp.config.json_types import JsonObject
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus import store
from torchtitan_cp.data.corpus.documents import Corpus, key_hash
from torchtitan_cp.data.corpus.encoding import Encoder, tokenize
from torchtitan_cp.data.corpus.records import Document, SkippedRecords
from torchtitan_cp.data.corpus.statistics import CONVERSATION_COUNTS, UNKNOWN, LengthStatistics, SourceStatistics
from torchtitan_cp.data.corpus.tokenizer import Tokenizer
from torchtitan_cp.data.errors import DataError, PreparationStoppedError

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
GROUPS_FILE, STATISTICS_FILE, UNIGRAM_FILE = "groups.jsonl", "statistics.json", "unigram.npy"
COMMIT_TOKENS = 16 << 20  # 32 or 64 MB, held in memory until then: the most that is lost with a killed pass


@dataclass
class _State:
    """What a pass needs to continue, apart from its files. The journal holds these fields by name.

    Attributes:
        place: the resume_point of the last document that was read; see Document.
        tokens: number of tokens written.
        kept_documents: documents that were long enough, counted before long ones are split.
        held_out_documents: how many of these are held out.
        left_out_documents, left_out_tokens: documents of fewer than min_document tokens.
        split_documents: documents longer than max_document.
        conversations: how many were too long, cut inside a learned turn, or left without a token to learn.
        unwritten: how many could not be written or learned from, by kind, up to `place`.
        groups: number of groups so far.
        lowest: (hash, key, tokens) of the kept document with the lowest hash.
        shortest: (tokens, key) of the shortest one.
        held_out_key: key of the document that is held out because no hash is low enough.
        seconds: that the pass has taken.
    """

    place: tuple[int, dict[str, int], int] = (0, {}, 0)
    tokens: int = 0
    kept_documents: int = 0
    held_out_documents: int = 0
    left_out_documents: int = 0
    left_out_tokens: int = 0
    split_documents: int = 0
    conversations: dict[str, int] = field(default_factory=dict)
    unwritten: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    lowest: tuple[int, str, int] = (1 << 64, "", 0)
    shortest: tuple[int, str] = (1 << 64, "")
    held_out_key: str | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """The journal has lists."""
        (lowest_hash, lowest_key, tokens), (shortest_tokens, shortest_key) = self.lowest, self.shortest
        self.lowest, self.shortest = (lowest_hash, lowest_key, tokens), (shortest_tokens, shortest_key)


class _Journal(TypedDict, total=False):
    """A pass that was killed: its _State by name, and the sizes of the files when it last committed."""

    settings: JsonObject
    state: dict[str, Any]
    file_bytes: dict[str, int]


@dataclass(eq=False)
class Tokenization:
    """The pass over one source, into one folder.

    Args:
        corpus: what is read.
        tokenizer: a text begins with its bos_ids, and ends with its eos_id, as does each part of a split one. Token
            ids of a corpus get no bos_ids. Conversations get neither: their template writes what ends a turn.
        folder: receives the files; may hold those of a pass that was killed.
        settings: kept in the journal.
        tokenizer_settings: by which workers load the tokenizer.
        stop_requested: called after each document, and for each file at the end; the pass commits before it stops.
        workers: see `encoding.tokenize`.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    folder: Path
    settings: JsonObject
    tokenizer_settings: TokenizerConfig
    stop_requested: Callable[[], bool]
    workers: int = 1

    def tokenize(self) -> JsonObject:
        """Tokenize the corpus. Returns what the manifest says about the files.

        Raises:
            DataError: the corpus or one of its splits has no document, or its token ids are not of this tokenizer.
            PreparationStoppedError: a stop was requested.
        """
        self._start(read_journal(self.folder) or {})
        self._begun = time.monotonic() - self.state.seconds
        self._read_corpus()
        source, state = self.corpus.source, self.state
        if source.validation_fraction > 0 and not state.held_out_documents and state.kept_documents > 1:
            where, fraction = source.where, source.validation_fraction
            logger.info("%s.validation_fraction = %g holds out no document, so one is chosen", where, fraction)
            # The document with the lowest hash, unless it is more than half of the text.
            chosen = state.lowest[1] if 2 * state.lowest[2] <= state.tokens else state.shortest[1]
            self._start({})
            self.state.held_out_key = chosen
            self._read_corpus(quiet=True)
        return self._finish()

    def _start(self, journal: _Journal) -> None:
        """Continue from the journal of a killed pass if the files match it, else start from the beginning."""
        sizes = journal.get("file_bytes", {})
        if damage := store.find_damage(self.folder, sizes, may_be_longer=True):
            logger.warning("the partial tokens in %s are damaged (%s); they are made again", self.folder, damage)
            journal, sizes = {}, {}
        for path in self.folder.iterdir():
            if path.name in sizes:
                os.truncate(path, sizes[path.name])
            elif not journal or path.name != store.JOURNAL_FILE:
                path.unlink()
        self.state = _State(**journal.get("state", {}))
        self._pending: list[list[tuple[np.ndarray, int]]] = [[], []]  # documents of each split
        self._masks: list[list[np.ndarray]] = [[], []]
        self._new_groups, self._committed_tokens = list[str](), self.state.tokens
        self._group_numbers: dict[str | None, int] = {}
        if journal:
            with open(self.folder / GROUPS_FILE, encoding="utf-8") as file:
                self._group_numbers = {name: number for number, name in map(json.loads, file)}
            logger.info("continuing after %d documents, %d tokens", self.state.kept_documents, self.state.tokens)

    def _read_corpus(self, *, quiet: bool = False) -> None:
        corpus, state = self.corpus, self.state
        first_file, skipped, read = state.place
        unread = SkippedRecords(skipped, quiet=quiet)  # counts ahead of what is written
        self.unwritten = SkippedRecords(state.unwritten, quiet=quiet)
        rest = islice(corpus.documents(unread, first_file, state.held_out_key), read, None)
        encoder = Encoder(self.tokenizer, corpus.source, corpus.template)
        settings = replace(self.tokenizer_settings, path=str(self.tokenizer.path or ""))
        encoded = tokenize(rest, encoder, self.unwritten, settings, self.workers)
        with corpus.show_progress("tokenizing") as update, closing(encoded):
            for document, ids, mask in encoded:
                self._write(document, ids, mask)
                update(document.read_bytes)
                self._check_stop()
        self.skipped = SkippedRecords(Counter(unread.counts) + Counter(self.unwritten.counts))
        if not (state.kept_documents or state.left_out_documents or state.conversations):
            raise corpus.no_document(self.skipped)
        if self.skipped.counts and not quiet:
            logger.warning("skipped in the corpus: %s", self.skipped.summary())

    def _write(self, document: Document, ids: np.ndarray, mask: np.ndarray | None) -> None:
        """Add one document, by the source's limits of length.

        Args:
            ids: `[n]`, without the token that ends the document.
            mask: `[n]` bool, which tokens of a conversation are learned; None: not a conversation.
        """
        state, source = self.state, self.corpus.source
        state.place, state.unwritten = document.resume_point, dict(self.unwritten.counts)
        end = [self.tokenizer.eos_id] if mask is None else []
        if len(ids) + len(end) < source.min_document:
            state.left_out_documents += 1
            state.left_out_tokens += len(ids) + len(end)
            return
        spans = [] if mask is None else self._learned_spans(mask)
        if not spans and mask is not None:
            return
        state.kept_documents += 1
        state.held_out_documents += document.held_out
        state.lowest = min(state.lowest, (key_hash(document.key), document.key, len(ids)))
        state.shortest = min(state.shortest, (len(ids), document.key))
        parts = max(1, -(-len(ids) // (source.max_document - 1))) if source.max_document and not spans else 1
        state.split_documents += parts > 1
        group, dtype = self._group_number(document.group), store.token_dtype(self.tokenizer.vocab_size)
        for part in [ids[slice(*span)] for span in spans] or np.array_split(ids, parts):
            tokens = np.concatenate([part, end], dtype=dtype, casting="unsafe")
            state.tokens += len(tokens)
            self._pending[document.held_out].append((tokens, group))
        self._masks[document.held_out] += [mask[slice(*span)] for span in spans if mask is not None]
        if state.tokens - self._committed_tokens >= COMMIT_TOKENS:
            self._commit()

    def _learned_spans(self, mask: np.ndarray) -> list[tuple[int, int]]:
        """The parts of a conversation that are kept: they fit max_document and have a token to learn."""
        source, counted = self.corpus.source, self.state.conversations
        spans = fit_conversation(mask, source.max_document, source.too_long)
        kept = [(start, stop) for start, stop in spans if mask[start + 1 : stop].any()]  # no token predicts the first
        cuts = {edge for span in spans for edge in span} - {0, len(mask)}
        counts = (spans != [(0, len(mask))], sum(mask[edge - 1] & mask[edge] for edge in cuts), len(spans) - len(kept))
        for kind, count in zip(CONVERSATION_COUNTS, map(int, counts), strict=True):
            counted[kind] = counted.get(kind, 0) + count
        return kept

    def _group_number(self, name: str | None) -> int:
        """The number of a group; for None a new number, which no other document has."""
        if name in self._group_numbers:
            return self._group_numbers[name]
        number, self.state.groups = self.state.groups, self.state.groups + 1
        if name is not None:
            self._group_numbers[name] = number
            self._new_groups.append(json.dumps([number, name]) + "\n")
        return number

    def _commit(self) -> None:
        """Write everything to disk, then the journal that says so."""
        for split, documents, masks in zip(SPLITS, self._pending, self._masks, strict=True):
            bits = masks if self.corpus.template else None
            store.append_documents(self.folder, split, self.tokenizer.vocab_size, documents, masks=bits)
            documents.clear()
            masks.clear()
        store.append_to(self.folder / GROUPS_FILE, "".join(self._new_groups).encode())
        self._new_groups.clear()
        self.state.seconds = time.monotonic() - self._begun
        journal = {"settings": self.settings, "state": asdict(self.state), "file_bytes": store.file_sizes(self.folder)}
        store.write_json(self.folder / store.JOURNAL_FILE, journal)
        self._committed_tokens = self.state.tokens

    def _check_stop(self) -> None:
        if self.stop_requested():
            self._commit()
            raise PreparationStoppedError(
                f"stopped while tokenizing: {self.state.tokens:,} tokens are in {self.folder}; the same command "
                "continues from there"
            )

    def _finish(self) -> JsonObject:
        self._refuse_empty_split()
        self._commit()
        state, vocab_size = self.state, self.tokenizer.vocab_size
        splits = [store.TokenStore(self.folder, split, vocab_size) for split in SPLITS]
        digests, unigram_counts = zip(*(split.summarize(self._check_stop) for split in splits), strict=True)
        np.save(self.folder / UNIGRAM_FILE, unigram_counts[0])
        store.append_to(self.folder / UNIGRAM_FILE, b"")  # waits for the disk
        train, held_out = (LengthStatistics.of(split.document_lengths) for split in splits)
        left_out = state.left_out_documents, state.left_out_tokens
        skipped = Counter(self.skipped.counts) + Counter(state.conversations) + self._count_unknown(unigram_counts)
        statistics = SourceStatistics(train, held_out, *left_out, state.split_documents, dict(skipped))
        store.write_json(self.folder / STATISTICS_FILE, asdict(statistics))
        (self.folder / store.JOURNAL_FILE).unlink()
        return {
            "content_fingerprint": hashlib.sha256("".join(digests).encode()).hexdigest(),
            "vocab_size": vocab_size,
            "seconds": round(time.monotonic() - self._begun, 3),
            "file_bytes": store.file_sizes(self.folder),
        }

    def _count_unknown(self, unigram_counts: Sequence[np.ndarray]) -> Counter[str]:
        """Tokens that stand for text which the tokenizer does not know; `[V]` counts of each split."""
        index = self.tokenizer.unknown_id
        if index is None or index == self.tokenizer.eos_id:  # as GPT-2's, which knows every byte
            return Counter()
        return Counter({UNKNOWN: sum(int(counts[index]) for counts in unigram_counts)})

    def _refuse_empty_split(self) -> None:
        source, kept, held_out = self.corpus.source, self.state.kept_documents, self.state.held_out_documents
        if not kept:
            others = "".join(f"; {count} x {kind}" for kind, count in self.state.conversations.items() if count)
            raise DataError(
                f"no document is left: {self.state.left_out_documents} documents are shorter than "
                f"{source.where}.min_document = {source.min_document} tokens{others}",
                fix="lower min_document" + "; or check max_document, too_long and loss_on" * bool(others),
            )
        if held_out == kept or (source.validation_fraction > 0 and not held_out):
            raise DataError(
                f"{source.where}.validation_fraction = {source.validation_fraction} holds out {held_out} of {kept} "
                "documents, and each split needs one",
                fix="give more documents (of text: files), "
                + "lower the fraction, " * (held_out > 0)
                + "or set it to 0 to disable validation",
            )


def read_journal(folder: Path) -> _Journal | None:
    """The journal of a pass that was killed in the folder; None if this version cannot continue from it."""
    journal = store.read_json(folder / store.JOURNAL_FILE)
    state = journal and journal.get("state")
    return cast(_Journal, journal) if isinstance(state, dict) and "unwritten" in state else None


def fit_conversation(mask: np.ndarray, most: int, too_long: str) -> list[tuple[int, int]]:
    """The parts of a conversation that are kept, as (start, stop) of tokens, in order.

    Args:
        mask: `[n]` bool, which tokens are learned.
        most: the largest number of tokens in a part; 0: any number.
        too_long: what happens to a longer conversation: `drop`, `truncate_left`, `truncate_right`, or `split`, which
            cuts after the last learned turn that fits, else after `most` tokens.
    """
    tokens = len(mask)
    if not most or tokens <= most:
        return [(0, tokens)]
    if too_long != "split":
        return {"drop": [], "truncate_left": [(tokens - most, tokens)], "truncate_right": [(0, most)]}[too_long]
    ends, edges = np.flatnonzero(mask[:-1] & ~mask[1:]) + 1, [0]
    while tokens - edges[-1] > most:
        fitting = ends[(ends > edges[-1]) & (ends <= edges[-1] + most)]
        edges.append(int(fitting[-1]) if len(fitting) else edges[-1] + most)
    return list(pairwise([*edges, tokens]))
