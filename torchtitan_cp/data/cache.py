"""Preparing a corpus once: tokens in a folder of the cache, made by one process and found by all others.

A folder is made under a `.partial` name and renamed when it is complete, so a build that was killed leaves nothing
that looks finished. One lock per cache folder lets one process build at a time; the system frees it with the process.
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

from torchtitan_cp.config.sections import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus import Corpus
from torchtitan_cp.data.errors import DataError
from torchtitan_cp.data.manifest import FORMAT_VERSION, MANIFEST_FILE, find_damage, read_manifest
from torchtitan_cp.data.store import TokenStore
from torchtitan_cp.data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer, trains_tokenizer
from torchtitan_cp.data.tokenizing import UNIGRAM_FILE, training_texts, write_splits
from torchtitan_cp.data.vocabulary import RECIPE_VERSION, train_sentencepiece

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
MODEL_FILE = "tokenizer.model"
PARTIAL = ".partial"
KEY_CHARACTERS = 24


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus as tokens.

    Attributes:
        train: what is learned from.
        validation: what is held out; no document if data.validation_fraction is 0.
        tokenizer: that made the tokens.
        unigram_counts: `[V]` int64, how often each token stands in `train`.
        fingerprint: sha256 (hex) of the tokens and document lengths, the same on every machine that has the same.
    """

    train: TokenStore
    validation: TokenStore
    tokenizer: Tokenizer
    unigram_counts: np.ndarray
    fingerprint: str


def prepare(data: Data, tokenizer: TokenizerConfig) -> PreparedCorpus:
    """The corpus's tokens, from the cache where they are, made where they are not.

    Every process of a job may call it: one builds, the others wait for it.

    Raises:
        DataError: corpus or tokenizer cannot be used, a split is empty, or the cache folder cannot be written.
    """
    build = _Build.plan(data, tokenizer)
    if build.is_finished():
        return build.open()
    with _exclusive(build.root):
        if not build.is_finished():
            build.run()
    return build.open()


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
        given: the tokenizer; None if one is to be trained.
        tokenizer_settings: `[tokenizer]`.
        settings: the keys its content depends on, for the manifest.
    """

    root: Path
    folder: Path
    corpus: Corpus
    given: Tokenizer | None
    tokenizer_settings: TokenizerConfig
    settings: dict[str, Any]

    @classmethod
    def plan(cls, data: Data, tokenizer: TokenizerConfig) -> "_Build":
        """Look at the corpus and the tokenizer, and name the folder."""
        given = None if trains_tokenizer(tokenizer) else load_tokenizer(tokenizer)
        corpus = Corpus(data)
        # A tokenizer that is yet to be trained follows from the corpus and this recipe.
        recipe = given.fingerprint if given else f"sentencepiece {RECIPE_VERSION} {tokenizer.vocab_size}"
        key = hashlib.sha256(json.dumps([FORMAT_VERSION, corpus.fingerprint(), recipe]).encode()).hexdigest()
        settings = {"data": dataclasses.asdict(data), "tokenizer": dataclasses.asdict(tokenizer)}
        for where_or_when in ("cache_folder", "prefetch_batches"):
            settings["data"].pop(where_or_when)
        root = Path(data.cache_folder).expanduser()
        return cls(root, root / key[:KEY_CHARACTERS], corpus, given, tokenizer, settings)

    def is_finished(self) -> bool:
        """Whether the folder is there and as its manifest says."""
        return self.folder.exists() and not find_damage(self.folder)

    def open(self) -> PreparedCorpus:
        """The finished folder's content."""
        manifest = read_manifest(self.folder)
        assert manifest is not None, "only finished folders are opened"
        skipped = ", ".join(f"{count} x {kind}" for kind, count in manifest.rejects.items())
        logger.info(
            "corpus: %d documents and %d tokens to train on, %d and %d held out, in %s%s",
            *(counts[split] for split in ("train", "validation") for counts in (manifest.documents, manifest.tokens)),
            self.folder,
            f"; skipped: {skipped}" if skipped else "",
        )
        return PreparedCorpus(
            train=TokenStore(self.folder, "train", manifest.vocab_size),
            validation=TokenStore(self.folder, "validation", manifest.vocab_size),
            tokenizer=self.given or SentencePieceTokenizer(self.folder / MODEL_FILE),
            unigram_counts=np.load(self.folder / UNIGRAM_FILE),
            fingerprint=manifest.content_fingerprint,
        )

    def run(self) -> None:
        """Make the folder. The caller holds the lock."""
        self._tell_why()
        partial = self.folder.with_name(self.folder.name + PARTIAL)
        try:
            for stale in self.root.glob("[0-9a-f]" * KEY_CHARACTERS + PARTIAL):  # nobody's: the lock is ours
                shutil.rmtree(stale)
            partial.mkdir()
            self._fill(partial)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            os.rename(partial, self.folder)
        except OSError as error:
            raise _cannot_write(self.root, error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _fill(self, folder: Path) -> None:
        tokenizer = self.given
        if tokenizer is None:
            logger.info("training a tokenizer of %d pieces on the corpus", self.tokenizer_settings.vocab_size)
            train_sentencepiece(training_texts(self.corpus), self.tokenizer_settings.vocab_size, folder / MODEL_FILE)
            tokenizer = SentencePieceTokenizer(folder / MODEL_FILE)
        manifest = write_splits(self.corpus, tokenizer, folder, self.settings)
        manifest.write(folder)

    def _tell_why(self) -> None:
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
        logger.info("preparing %d files, %.0f MB, in %s", len(self.corpus.files), megabytes, self.folder)


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
