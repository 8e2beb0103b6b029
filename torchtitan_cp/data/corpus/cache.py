"""Preparing a corpus once: tokens in folders of the cache, made by one process and found by all others.

A folder is made under a `.partial` name and renamed when it is complete, so a build that was killed leaves nothing
that looks finished; the next one goes on from its last commit. One lock per cache folder lets one process build at a
time; the system frees it with the process.
"""

import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_cp.config.sections import Data, SourceKeys
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.documents import Corpus
from torchtitan_cp.data.corpus.manifest import FORMAT_VERSION, MANIFEST_FILE, find_damage, read_manifest
from torchtitan_cp.data.corpus.statistics import SourceStatistics
from torchtitan_cp.data.corpus.store import TokenStore
from torchtitan_cp.data.corpus.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer, trains_tokenizer
from torchtitan_cp.data.corpus.tokenizing import UNIGRAM_FILE, read_journal, training_texts, write_splits
from torchtitan_cp.data.corpus.vocabulary import RECIPE_VERSION, train_sentencepiece
from torchtitan_cp.data.errors import DataError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
PARTIAL = ".partial"
KEY_CHARACTERS = 24


@dataclass(frozen=True)
class PreparedSource:
    """One source as tokens.

    Attributes:
        train: what is learned from.
        validation: what is held out; no document if validation_fraction is 0.
        statistics: lengths of its documents, and what was left out.
        unigram_counts: `[V]` int64, how often each token stands in `train`.
        fingerprint: sha256 (hex) of the tokens, document lengths and groups, the same on every machine that has the
            same.
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
        tokenizer: that made the tokens of all.
    """

    sources: dict[str, PreparedSource]
    tokenizer: Tokenizer

    @property
    def unigram_counts(self) -> np.ndarray:
        """`[V]` int64, how often each token stands in the training splits of all sources."""
        return np.sum([source.unigram_counts for source in self.sources.values()], axis=0)

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the sources' names and fingerprints, in any order."""
        named = sorted((name, source.fingerprint) for name, source in self.sources.items())
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def prepare(data: Data, tokenizer: TokenizerConfig) -> PreparedCorpus:
    """The corpus's tokens, from the cache where they are, made where they are not.

    Every source has a folder of its own there. Every process of a job may call it: one builds, the others wait for it.

    Raises:
        DataError: a source or the tokenizer cannot be used, a split is empty, or the cache folder cannot be written.
    """
    root = Path(data.cache_folder).expanduser()
    corpora = {name: Corpus(source) for name, source in data.by_name().items()}
    found = _train_once(root, list(corpora.values()), tokenizer) if trains_tokenizer(tokenizer) else None
    shared = found or load_tokenizer(tokenizer)
    return PreparedCorpus(
        {name: _prepare_source(_Build.plan(root, corpus, shared, tokenizer), name) for name, corpus in corpora.items()},
        shared,
    )


def _train_once(root: Path, corpora: list[Corpus], settings: TokenizerConfig) -> Tokenizer:
    """The tokenizer that follows from these corpora and the recipe: trained on all of them, once."""
    recipe = [RECIPE_VERSION, settings.vocab_size, *(corpus.fingerprint() for corpus in corpora)]
    model = root / f"tokenizer-{_digest(recipe)}.model"
    if not model.exists():
        with _exclusive(root):
            if not model.exists():
                logger.info("training a tokenizer of %d pieces on the corpus", settings.vocab_size)
                try:
                    train_sentencepiece(training_texts(corpora), settings.vocab_size, model)
                except OSError as error:
                    raise _cannot_write(root, error) from error
    try:
        return SentencePieceTokenizer(model)
    except DataError as error:
        raise DataError(f"the trained tokenizer {model} is damaged", fix="delete it: it is trained again") from error


def _prepare_source(build: "_Build", name: str) -> PreparedSource:
    if not build.is_finished():
        with _exclusive(build.root):
            if not build.is_finished():
                build.run(name)
    return build.open(name)


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:KEY_CHARACTERS]


def tokenizer_of(data: Data, tokenizer: TokenizerConfig) -> Tokenizer:
    """The run's tokenizer: from its file, or as it was trained on the corpus.

    Raises:
        DataError: as `prepare`, or `load_tokenizer`.
    """
    return prepare(data, tokenizer).tokenizer if trains_tokenizer(tokenizer) else load_tokenizer(tokenizer)


@dataclass(frozen=True)
class _Build:
    """One folder of the cache, made or to be made.

    Attributes:
        root: the cache folder.
        folder: in it, named for everything its content depends on.
        corpus: what is read.
        tokenizer: what makes tokens of it.
        settings: the keys its content depends on, for the manifest.
    """

    root: Path
    folder: Path
    corpus: Corpus
    tokenizer: Tokenizer
    settings: dict[str, Any]

    @classmethod
    def plan(cls, root: Path, corpus: Corpus, tokenizer: Tokenizer, asked: TokenizerConfig) -> "_Build":
        """Name the folder for what its content depends on. `asked` is `[tokenizer]`."""
        source = corpus.source
        lengths = [source.min_document, source.max_document]
        key = _digest([FORMAT_VERSION, corpus.fingerprint(), lengths, tokenizer.fingerprint])
        keys = {entry.name: getattr(source, entry.name) for entry in dataclasses.fields(SourceKeys)}
        return cls(root, root / key, corpus, tokenizer, {"data": keys, "tokenizer": dataclasses.asdict(asked)})

    def is_finished(self) -> bool:
        """Whether the folder is there and as its manifest says."""
        return self.folder.exists() and not find_damage(self.folder)

    def open(self, name: str) -> PreparedSource:
        """The finished folder's content. `name` is the source's."""
        manifest = read_manifest(self.folder)
        assert manifest is not None, "only finished folders are opened"
        statistics = SourceStatistics.read(self.folder)
        skipped = statistics.skipped()
        logger.info(
            "%s: %d documents and %d tokens to train on, %d and %d held out, in %s%s",
            name,
            *(counts[split] for split in ("train", "validation") for counts in (manifest.documents, manifest.tokens)),
            self.folder,
            f"; skipped: {skipped}" if skipped else "",
        )
        return PreparedSource(
            train=TokenStore(self.folder, "train", manifest.vocab_size),
            validation=TokenStore(self.folder, "validation", manifest.vocab_size),
            statistics=statistics,
            unigram_counts=np.load(self.folder / UNIGRAM_FILE),
            fingerprint=manifest.content_fingerprint,
        )

    def run(self, name: str) -> None:
        """Make the folder, from where a build that was killed left off. The caller holds the lock."""
        self._tell_why(name)
        partial = self.folder.with_name(self.folder.name + PARTIAL)
        try:
            self._remove_stale()
            partial.mkdir(exist_ok=True)
            write_splits(self.corpus, self.tokenizer, partial, self.settings).write(partial)
            if self.is_finished():  # by another node meanwhile, as a folder on NFS may come late
                return
            if self.folder.exists():
                shutil.rmtree(self.folder)
            os.rename(partial, self.folder)
        except OSError as error:
            raise _cannot_write(self.root, error) from error
        finally:
            if read_journal(partial) is None:
                shutil.rmtree(partial, ignore_errors=True)

    def _remove_stale(self) -> None:
        """Clear away builds that no one can go on from: killed before their first commit, or of a corpus that changed.

        No one makes them now, for the lock is ours.
        """
        for partial in self.root.glob("[0-9a-f]" * KEY_CHARACTERS + PARTIAL):
            journal = read_journal(partial)
            if journal is None or (journal.get("settings") == self.settings and partial.stem != self.folder.name):
                shutil.rmtree(partial)

    def _tell_why(self, name: str) -> None:
        """Say what is done, and if a folder is damaged or an input changed since a build with the same settings."""
        if self.folder.exists():
            damage = find_damage(self.folder)
            logger.warning("the prepared corpus in %s is damaged (%s); it is made again", self.folder, damage)
        for path in self.root.glob(f"*/{MANIFEST_FILE}"):
            earlier = read_manifest(path.parent)
            if path.parent == self.folder or earlier is None or earlier.settings != self.settings:
                continue
            corpus_changed = earlier.corpus_fingerprint != self.corpus.fingerprint()
            logger.warning(
                "the %s changed since %s was made; the tokens are made again (that folder is no longer needed)",
                "corpus" if corpus_changed else "tokenizer",
                path.parent,
            )
            break
        megabytes = self.corpus.size_bytes / 1e6
        logger.info("preparing %s: %d files, %.0f MB, in %s", name, len(self.corpus.files), megabytes, self.folder)


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Hold the cache folder's lock; wait for it, saying so once, if another process does."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / LOCK_FILE, "ab")  # noqa: SIM115
    except OSError as error:
        raise _cannot_write(root, error) from error
    with lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process that prepares a corpus in %s", root)
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise _cannot_write(root, error) from error
        yield


def _cannot_write(root: Path, error: OSError) -> DataError:
    return DataError(
        f"data.cache_folder = {str(root)!r} cannot be written: {error.strerror or error}",
        fix="give data.cache_folder a folder that can be written and locked, on a disk with room for the tokens",
    )
