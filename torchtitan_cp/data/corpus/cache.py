"""Prepare a corpus once: tokens in folders of the cache, made by one process and read by all others.

A folder is made under a `.partial` name and renamed when it is complete, so a killed build leaves nothing that looks
finished; the next one continues from its last commit. A lock on the cache folder lets one process build at a time; the
system releases it with the process.
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from torchtitan_cp.config.data import Data, SourceKeys
from torchtitan_cp.config.errors import name_in_errors
from torchtitan_cp.config.file_lock import lock_file
from torchtitan_cp.config.json_types import Json, JsonObject
from torchtitan_cp.config.names import format_bytes, format_duration
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.chat import find_chat_template
from torchtitan_cp.data.corpus.documents import Corpus
from torchtitan_cp.data.corpus.records import SkippedRecords
from torchtitan_cp.data.corpus.sources import count_repeated, unread_suffixes
from torchtitan_cp.data.corpus.statistics import SourceStatistics
from torchtitan_cp.data.corpus.store import MANIFEST_FILE, TokenStore, find_damage, read_manifest, write_json
from torchtitan_cp.data.corpus.tokenization import SPLITS, STATISTICS_FILE, UNIGRAM_FILE, Tokenization, read_journal
from torchtitan_cp.data.corpus.tokenizer import Tokenizer, load_tokenizer, usable_cores
from torchtitan_cp.data.corpus.tokenizer_training import train_sentencepiece
from torchtitan_cp.data.errors import DataError, PreparationStoppedError

logger = logging.getLogger(__name__)

FORMAT_VERSION, CHAT_VERSION, RECIPE_VERSION = 2, 7, 1  # of tokens, of conversations, and of a tokenizer's training
LOCK_FILE = ".lock"
PARTIAL = ".partial"
KEY_CHARACTERS = 24
LOCK_POLL_SECONDS = 0.2
BYTES_PER_CORE_SECOND, BYTES_PER_TOKEN = 3e6, 4  # for estimates: of text, by SentencePiece; see docs/data.md


@dataclass(frozen=True)
class PreparedSource:
    """One source as tokens.

    Attributes:
        train: what is trained on.
        validation: what is held out; no document if validation_fraction is 0.
        statistics: lengths of its documents, and what was left out.
        unigram_counts: `[V]` int64, how often each token occurs in `train`.
        fingerprint: sha256 (hex) of the tokens, document lengths and groups; the same on every machine.
    """

    train: TokenStore
    validation: TokenStore
    statistics: SourceStatistics
    unigram_counts: np.ndarray
    fingerprint: str


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus as tokens.

    Attributes:
        sources: by name, in the config's order.
        tokenizer: that made the tokens of all sources.
    """

    sources: dict[str, PreparedSource]
    tokenizer: Tokenizer

    @property
    def unigram_counts(self) -> np.ndarray:
        """`[V]` int64, how often each token occurs in the training splits of all sources."""
        return np.sum([source.unigram_counts for source in self.sources.values()], axis=0)

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the sources' names and fingerprints, in any order."""
        named = sorted((name, source.fingerprint) for name, source in self.sources.items())
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()


@dataclass(frozen=True)
class UnpreparedText:
    """What a run would have to tokenize.

    Attributes:
        sources: their names.
        files, size_bytes: of these sources, as stored on disk; a dataset by name has no size.
    """

    sources: tuple[str, ...]
    files: int
    size_bytes: int

    def __str__(self) -> str:
        files = f"{', '.join(self.sources)}: {self.files:,} file{'s' * (self.files != 1)}"
        if not self.size_bytes:
            return f"{files} of unknown size"
        tokens, cores = float(f"{self.size_bytes / BYTES_PER_TOKEN:.1g}"), usable_cores()
        seconds = float(f"{self.size_bytes / BYTES_PER_CORE_SECOND / cores:.1g}")
        duration = format_duration(seconds) if seconds >= 1 else "under a second"
        size = format_bytes(self.size_bytes)
        return f"{files}, {size}, very roughly {tokens:,.0f} tokens, {duration} on {cores} core{'s' * (cores > 1)}"


class CacheLocations(TypedDict):
    """Paths of the tokenizer, empty without a file, and of each source's folder, by its name."""

    tokenizer: str
    folders: dict[str, str]


def prepare(data: Data, tokenizer: TokenizerConfig, start: Path | None = None, *, workers: int = 1) -> PreparedCorpus:
    """The corpus's tokens, prepared to the end; see `CacheBuilder` and `open_cache`."""
    return open_cache(CacheBuilder(data, tokenizer, lambda: False, start, workers).build(), data, tokenizer)


def open_cache(locations: CacheLocations, data: Data, tokenizer: TokenizerConfig) -> PreparedCorpus:
    """Open what `CacheBuilder.build` returned; `data` and `tokenizer` are the config's sections."""
    shared = load_tokenizer(dataclasses.replace(tokenizer, path=locations["tokenizer"]))
    sources = {name: _open_source(name, Path(folder)) for name, folder in locations["folders"].items()}
    return PreparedCorpus(sources, shared)


def _open_source(name: str, folder: Path) -> PreparedSource:
    with name_in_errors(folder):
        manifest, values = (json.loads((folder / file).read_text("utf-8")) for file in (MANIFEST_FILE, STATISTICS_FILE))
        stores = [TokenStore(folder, split, manifest["vocab_size"]) for split in SPLITS]
        unigram_counts = np.load(folder / UNIGRAM_FILE)
    statistics = SourceStatistics.from_json(values)
    train, held_out = statistics.train, statistics.validation
    took = f", which took {format_duration(manifest['seconds'])} to make" if manifest.get("seconds") else ""
    kept = f"{train.documents:,} document{'s' * (train.documents != 1)} with {train.tokens:,} tokens to train on"
    apart = f"{held_out.documents:,} with {held_out.tokens:,}" if held_out.documents else "none"
    logger.info(f"{name}: {kept}, {apart} held out, in {folder}{took}{statistics.left_out()}")
    return PreparedSource(stores[0], stores[1], statistics, unigram_counts, manifest["content_fingerprint"])


class CacheBuilder:
    """Makes what the cache does not have yet.

    Args:
        data, tokenizer: sections of the config.
        stop_requested: called often; a stop loses nothing that was committed.
        start: folder of the checkpoint that training begins from, for its chat template.
        workers: processes that tokenize; 1: this one.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: TokenizerConfig,
        stop_requested: Callable[[], bool],
        start: Path | None = None,
        workers: int = 1,
    ) -> None:
        self.root, self.sources = Path(os.path.expanduser(data.cache_folder)), data.by_name()
        self.settings, self.stop_requested, self.start, self.workers = tokenizer, stop_requested, start, workers

    def build(self) -> CacheLocations:
        """List the corpus's files, then make the tokens and the tokenizer that are missing.

        Every source has a folder of its own. Any number of processes may do this: one builds, the others wait for it.

        Returns:
            the paths of everything, for `open_cache` in this process and others.

        Raises:
            DataError: a source or the tokenizer cannot be used, a split is empty, or the cache folder cannot be
                written.
            PreparationStoppedError: a stop was requested.
        """
        corpora = self._open_corpora()
        for corpus in corpora.values():
            if corpus.template and not corpus.template.teaches_to_end(corpus.source.loss_on):
                logger.warning(
                    f"{corpus.source.where}: under the chat template no token after an answer is learned, so the model "
                    "will not learn to stop; put the token that ends a turn there, inside {% generation %} if it has "
                    "that"
                )
        if self.settings.trained:
            self._train_tokenizer(corpora.values())
        tokenizer = self._load_tokenizer(corpora.values())
        if tokenizer.lost:
            fix = "give its model an unk_token of its own, or take another tokenizer"
            logger.warning(f"the tokenizer {tokenizer.path} {tokenizer.lost}\n  fix: {fix}")
        folders = {name: str(self._tokenize(name, corpus, tokenizer)) for name, corpus in corpora.items()}
        return {"tokenizer": str(tokenizer.path or ""), "folders": folders}

    def find_unprepared(self) -> UnpreparedText | None:
        """What `build` would tokenize; None if the cache has it all. Nothing is written.

        Raises:
            DataError: a source or the tokenizer cannot be used.
        """
        corpora = self._open_corpora()
        missing = corpora
        if not self.settings.trained or self._trained_model(corpora.values()).exists():
            tokenizer = self._load_tokenizer(corpora.values())
            missing = {
                name: corpus for name, corpus in corpora.items() if _damage_of(self._folder_of(corpus, tokenizer))
            }
        files = sum(len(corpus.files) for corpus in missing.values())
        size_bytes = sum(corpus.size_bytes for corpus in missing.values())
        return UnpreparedText(tuple(missing), files, size_bytes) if missing else None

    def _open_corpora(self) -> dict[str, Corpus]:
        """The sources with their files listed, by name."""
        templates = {
            name: find_chat_template(source, self.settings, self.start) if source.conversations else None
            for name, source in self.sources.items()
        }
        return {name: Corpus(source, templates[name]) for name, source in self.sources.items()}

    def _trained_model(self, corpora: Collection[Corpus]) -> Path:
        """The file of the tokenizer that follows from these corpora and the recipe."""
        recipe: list[Json] = [RECIPE_VERSION, self.settings.vocab_size, *(corpus.fingerprint for corpus in corpora)]
        return self.root / f"tokenizer-{_digest(recipe)}.model"

    def _train_tokenizer(self, corpora: Collection[Corpus]) -> None:
        """Train the tokenizer on all of these corpora, unless its file is there."""
        model = self._trained_model(corpora)
        if not model.exists():
            with self._lock():
                if not model.exists():
                    logger.info("training a tokenizer of %d pieces on the corpus", self.settings.vocab_size)
                    train_sentencepiece(self._training_texts(corpora), self.settings.vocab_size, model)

    def _load_tokenizer(self, corpora: Collection[Corpus]) -> Tokenizer:
        if not self.settings.trained:
            return load_tokenizer(self.settings)
        model = self._trained_model(corpora)
        try:
            return load_tokenizer(dataclasses.replace(self.settings, path=str(model)))
        except DataError as error:
            raise DataError(
                f"the trained tokenizer {model} is damaged", fix="delete it: it is trained again"
            ) from error

    def _training_texts(self, corpora: Collection[Corpus]) -> Iterator[str]:
        """The text of every document that is not held out. Skipped records are logged later, by the tokenizing pass."""
        for corpus in corpora:
            with corpus.show_progress("reading text to train a tokenizer on") as update:
                for document, text in corpus.texts(SkippedRecords(quiet=True)):
                    update(document.read_bytes)
                    self._check_stop("reading text to train a tokenizer on")
                    if not document.held_out:
                        yield text

    def _folder_of(self, corpus: Corpus, tokenizer: Tokenizer) -> Path:
        """The folder of a source's tokens, named for everything that they depend on."""
        source = corpus.source
        lengths: list[Json] = [source.min_document, source.max_document]
        lengths += [source.too_long, CHAT_VERSION] if source.conversations else []
        return self.root / _digest([FORMAT_VERSION, corpus.fingerprint, lengths, tokenizer.fingerprint])

    def _tokenize(self, name: str, corpus: Corpus, tokenizer: Tokenizer) -> Path:
        """The folder of a source's tokens, which are made if it is not finished."""
        source, folder = corpus.source, self._folder_of(corpus, tokenizer)
        if not _damage_of(folder):
            return folder
        keys = {entry.name: getattr(source, entry.name) for entry in dataclasses.fields(SourceKeys)}
        settings: JsonObject = {"data": keys, "tokenizer": dataclasses.asdict(self.settings)}
        partial = folder.with_name(folder.name + PARTIAL)
        with self._lock():
            if not _damage_of(folder):
                return folder
            _log_reason(folder, name, corpus, settings)
            _remove_stale(partial, settings)
            try:
                partial.mkdir(exist_ok=True)
                made = Tokenization(
                    corpus, tokenizer, partial, settings, self.settings, self.stop_requested, self.workers
                ).tokenize()
                inputs = {"corpus_fingerprint": corpus.fingerprint, "tokenizer_fingerprint": tokenizer.fingerprint}
                manifest = {"format_version": FORMAT_VERSION, "settings": settings, **inputs, **made}
                write_json(partial / MANIFEST_FILE, manifest)
                if _damage_of(folder):  # on NFS the finished folder of another node may appear late
                    shutil.rmtree(folder, ignore_errors=True)
                    os.rename(partial, folder)
            finally:
                if read_journal(partial) is None:
                    shutil.rmtree(partial, ignore_errors=True)
        return folder

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the cache folder's lock; while another process holds it, wait and say so once."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with open(self.root / LOCK_FILE, "ab") as lock:
                lock_file(lock, LOCK_POLL_SECONDS, self._while_locked)
                yield
        except OSError as error:
            raise DataError(
                f"data.cache_folder = {str(self.root)!r} cannot be written: {error.strerror or error}",
                fix="give data.cache_folder a folder that can be written and locked, on a disk with room for tokens",
            ) from error

    def _while_locked(self, attempt: int) -> None:
        if attempt == 0:
            logger.info("waiting for another process that prepares a corpus in %s", self.root)
        self._check_stop("waiting for another process that prepares the corpus")

    def _check_stop(self, activity: str) -> None:
        if self.stop_requested():
            raise PreparationStoppedError(f"stopped while {activity}; the same command starts that again")


def _digest(values: Json) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:KEY_CHARACTERS]


def _damage_of(folder: Path) -> str:
    """What is wrong with a folder of the cache; empty if it is as its manifest says."""
    manifest = read_manifest(folder)
    return find_damage(folder, manifest["file_bytes"]) if manifest else f"{MANIFEST_FILE} is missing or unreadable"


def _remove_stale(partial: Path, settings: JsonObject) -> None:
    """Delete builds that cannot continue: killed before their first commit, or of a corpus that has changed."""
    for other in partial.parent.glob("[0-9a-f]" * KEY_CHARACTERS + PARTIAL):
        journal = read_journal(other)
        if journal is None or (journal["settings"] == settings and other != partial):
            shutil.rmtree(other)


def _log_reason(folder: Path, name: str, corpus: Corpus, settings: JsonObject) -> None:
    """Log what is built, and why if the folder is damaged or an input changed since a build with the same settings."""
    if folder.exists():
        logger.warning("the prepared corpus in %s is damaged (%s); it is made again", folder, _damage_of(folder))
    for path in folder.parent.glob(f"*/{MANIFEST_FILE}"):
        earlier = read_manifest(path.parent)
        if path.parent != folder and earlier and earlier["settings"] == settings:
            changed = "tokenizer" if earlier["corpus_fingerprint"] == corpus.fingerprint else "corpus"
            message = "the %s changed since %s was made; the tokens are made again (that folder is no longer needed)"
            logger.warning(message, changed, path.parent)
            break
    files = f"{len(corpus.files)} file{'s' * (len(corpus.files) != 1)}"
    logger.info("preparing %s: %s, %s, in %s", name, files, format_bytes(corpus.size_bytes), folder)
    if others := unread_suffixes(corpus.source):
        counts = ", ".join(f"{count} x {suffix}" for suffix, count in sorted(others.items()))
        logger.warning("%s: other files in its folder are not read: %s", name, counts)
    if repeated := count_repeated(corpus.files):
        logger.warning("%s: %d of its files are links to others of them, whose text is read again", name, repeated)
