"""Random tokens stand in for a corpus: the same on every rank, of every source, with masks where there are some."""

import pickle

import numpy as np

from torchtitan_cp.config.data import Data, DataSource
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.corpus.random_tokens import random_corpus


def test_each_source_has_documents_of_many_lengths_and_the_same_ones_for_a_seed() -> None:
    sources = (DataSource(name="books"), DataSource(name="chats", source="jsonl", messages_field="messages"))
    made, again, other = (random_corpus(Data(sources=sources), 100, seed) for seed in (0, 0, 7))
    assert list(made.sources) == ["books", "chats"]
    assert made.fingerprint == again.fingerprint != other.fingerprint
    for source in made.sources.values():
        store = source.train
        assert store.tokens == store.document_lengths.sum() > 1 << 17
        assert store.document_lengths.min() == 1
        assert store.document_lengths.max() > 1024
        every = np.concatenate([store.read(at, 0, length) for at, length in enumerate(store.document_lengths)])
        assert set(every) == set(range(100))
        np.testing.assert_array_equal(source.unigram_counts, np.bincount(every))
        assert not source.validation.tokens
        assert source.statistics.train.documents == store.documents
        copy = pickle.loads(pickle.dumps(store))
        longest = int(store.document_lengths.argmax())
        np.testing.assert_array_equal(copy.read(longest, 7, 40), store.read(longest, 7, 40))


def test_of_conversations_every_other_turn_is_learned() -> None:
    chats = Data(source="jsonl", messages_field="messages")
    store = random_corpus(chats, 50, 0).sources["corpus"].train
    longest = int(store.document_lengths.argmax())
    mask = store.read_mask(longest, 8, 40)
    assert mask is not None
    assert mask.tolist() == [False] * 8 + [True] * 16 + [False] * 8
    assert random_corpus(Data(), 50, 0).sources["corpus"].train.read_mask(longest, 8, 40) is None


def test_a_stream_reads_them_in_either_order() -> None:
    store = random_corpus(Data(), 50, 0).sources["corpus"].train
    for order in ("shuffled", "related"):
        read = TokenStream(store, 4096, 0, order=order).read(store.tokens - 10, 30)
        assert len(read) == 30
