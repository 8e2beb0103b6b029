"""A corpus of random tokens, in memory: for comparisons of a model with itself, which need no text."""

import hashlib

import numpy as np

from torchtitan_cp.config.data import Data
from torchtitan_cp.data.corpus.cache import PreparedCorpus, PreparedSource
from torchtitan_cp.data.corpus.statistics import LengthStatistics, SourceStatistics
from torchtitan_cp.data.corpus.store import TokenStore
from torchtitan_cp.data.corpus.tokenizer import ByteTokenizer

DOCUMENTS, LONGEST = 1024, 2048
TURN_TOKENS = 16  # of conversations; every other turn is learned
GROUP_DOCUMENTS = 4


class RandomStore(TokenStore):
    """A split of random tokens.

    Args:
        vocab_size: V.
        lengths: `[documents]` int64, in tokens.
        seed: of the tokens.
        has_masks: the documents are conversations.
    """

    def __init__(self, vocab_size: int, lengths: np.ndarray, seed: int, has_masks: bool) -> None:
        self.vocab_size, self.seed, self.has_masks = vocab_size, seed, has_masks
        self.document_lengths, self.documents, self.tokens = lengths, len(lengths), int(lengths.sum())
        self.groups = np.arange(self.documents) // GROUP_DOCUMENTS
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self.ids = np.random.default_rng(seed).integers(vocab_size, size=self.tokens)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return RandomStore, (self.vocab_size, self.document_lengths, self.seed, self.has_masks)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        begin = self._starts[document]
        return self.ids[begin + start : begin + stop]

    def read_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        return np.arange(start, stop) // TURN_TOKENS % 2 == 1 if self.has_masks else None


def random_corpus(data: Data, vocab_size: int, seed: int) -> PreparedCorpus:
    """1,024 documents of random tokens for each source of the config; nothing is held out.

    They have 1 to 2,048 tokens, or to max_document, the fewer the longer, so that packing and masks have work. The
    tokenizer is the one of bytes, which made none of these tokens.

    Args:
        vocab_size: V of the model.
        seed: the same seed gives the same tokens on every rank.
    """
    sources = {}
    for number, (name, source) in enumerate(data.by_name().items()):
        own_seed = seed + number
        fractions = np.random.default_rng(own_seed).random(DOCUMENTS)
        longest = min(LONGEST, source.max_document or LONGEST)
        lengths = (longest**fractions).astype(np.int64)  # from 1 on
        train, held_out = (RandomStore(vocab_size, of, own_seed, source.conversations) for of in (lengths, lengths[:0]))
        statistics = SourceStatistics(LengthStatistics.of(lengths), LengthStatistics.of(lengths[:0]), 0, 0, 0, {})
        fingerprint = hashlib.sha256(train.ids.tobytes()).hexdigest()
        counts = np.bincount(train.ids, minlength=vocab_size)
        sources[name] = PreparedSource(train, held_out, statistics, counts, fingerprint)
    return PreparedCorpus(sources, ByteTokenizer())
