"""The order of tokens: a pure function of the cursor, that gives every token of an epoch once."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.memory import MemoryStore, masked
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.corpus.store import TokenStore, append_documents

LENGTHS = [5, 1, 17, 0, 30, 2, 9, 40, 3, 3, 11]
TOKENS = sum(LENGTHS)
FIRST = [6, 7, 8, 61, 62, 63, 12, 13, 14]


def store_of(folder: Path, lengths: list[int]) -> TokenStore:
    """A store whose tokens are 0, 1, 2, ... so that each tells where it stands."""
    begins = np.cumsum([0, *lengths])
    documents = [
        (np.arange(start, start + length), n) for n, (start, length) in enumerate(zip(begins, lengths, strict=False))
    ]
    append_documents(folder, "train", 1 << 16, documents, shard_bytes=32)
    return TokenStore(folder, "train", 1 << 16)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return store_of(tmp_path_factory.mktemp("store"), LENGTHS)


@pytest.mark.parametrize("block_tokens", [1, 7, 11, 40, TOKENS, TOKENS + 1, 10 * TOKENS])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("order", ["shuffled", "related"])
def test_every_epoch_gives_every_token_once(store: TokenStore, block_tokens: int, shuffle: bool, order: str) -> None:
    stream = TokenStream(store, block_tokens, seed=3, shuffle=shuffle, order=order)
    for epoch in range(4):
        assert sorted(stream.read(epoch * TOKENS, TOKENS)) == list(range(TOKENS))


def test_the_order_of_conversations_cuts_none(store: TokenStore) -> None:
    """Plain text is shuffled in blocks too, each edge of which cuts a document."""
    whole = [[document, 0, length] for document, length in enumerate(LENGTHS) if length]
    plain = TokenStream(store, 11, seed=3)
    assert len(plain.spans(0, TOKENS)) > len(whole)
    spans = masked(plain).spans(0, TOKENS).tolist()
    assert sorted(spans) == whole
    assert spans != whole, "shuffled"


@settings(deadline=None)
@given(
    block_tokens=st.integers(1, 200),
    seed=st.integers(0, 2**63),
    cursor=st.integers(0, 1000),
    sizes=st.lists(st.integers(0, 300), max_size=6),
    order=st.sampled_from(["shuffled", "related"]),
)
def test_reads_of_any_size_give_the_same_stream(
    store: TokenStore, block_tokens: int, seed: int, cursor: int, sizes: list[int], order: str
) -> None:
    whole = TokenStream(store, block_tokens, seed, order=order).read(cursor, sum(sizes))
    stream = TokenStream(store, block_tokens, seed, order=order)
    ends = np.cumsum([0, *sizes])
    backwards = [stream.read(cursor + int(end), size) for end, size in reversed(list(zip(ends, sizes, strict=False)))]
    np.testing.assert_array_equal(np.concatenate([np.empty(0, np.int64), *reversed(backwards)]), whole)


def test_epochs_and_seeds_give_other_orders(store: TokenStore) -> None:
    first, other = TokenStream(store, 11, seed=0), TokenStream(store, 11, seed=1)
    orders = [first.read(0, TOKENS), first.read(TOKENS, TOKENS), other.read(0, TOKENS), other.read(TOKENS, TOKENS)]
    assert len({order.tobytes() for order in orders}) == 4


def test_the_order_of_a_seed_never_changes(store: TokenStore) -> None:
    assert TokenStream(store, 3, seed=0).read(0, 9).tolist() == FIRST


def test_a_block_is_contiguous_text(store: TokenStore) -> None:
    """Inside a block, what follows a token in its document follows it in the stream."""
    ends = set(np.cumsum(LENGTHS) - 1)
    stream = TokenStream(store, 40, seed=5)
    for block in range(TOKENS // 40):
        tokens = stream.read(block * 40, 40)
        assert all(after == token + 1 or token in ends for token, after in pairwise(tokens))


def test_without_shuffling_tokens_come_in_the_stores_order(store: TokenStore) -> None:
    stream = TokenStream(store, 11, seed=0, shuffle=False)
    np.testing.assert_array_equal(stream.read(0, 2 * TOKENS), np.tile(np.arange(TOKENS), 2))


def test_a_store_smaller_than_a_sequence_repeats(tmp_path: Path) -> None:
    tokens = TokenStream(store_of(tmp_path, [3]), 64, seed=0).read(0, 65)
    np.testing.assert_array_equal(tokens, np.arange(65) % 3)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
    block_tokens=st.integers(1, 80),
    cursor=st.integers(0, 300),
    count=st.integers(0, 200),
    shuffle=st.booleans(),
)
def test_spans_are_the_text_that_is_read_in_as_few_rows_as_it_goes_on(
    lengths: list[int], block_tokens: int, cursor: int, count: int, shuffle: bool
) -> None:
    store = MemoryStore(lengths)
    stream = TokenStream(store, block_tokens, seed=2, shuffle=shuffle)
    rows = stream.spans(cursor, count)
    assert rows.dtype == np.int64
    assert rows.shape == (len(rows), 3)
    assert (rows[:, 1] < rows[:, 2]).all()
    text = [store.read(*row) for row in rows.tolist()]
    np.testing.assert_array_equal(np.concatenate([np.empty(0, np.int64), *text]), stream.read(cursor, count))
    one_by_one = [tuple(stream.spans(place, 1)[0]) for place in range(cursor, cursor + count)]
    goes_on = [a[0] == b[0] and a[2] == b[1] for a, b in pairwise(one_by_one)]
    assert len(rows) == min(count, 1) + goes_on.count(False)


GROUPS = [7, 3, 7, 7, 9, 3, 9, 9, 9, 3, 7]


def test_related_documents_follow_one_another_in_their_order() -> None:
    stream = TokenStream(MemoryStore(LENGTHS, GROUPS), 11, seed=1, order="related")
    orders = set()
    for epoch in range(12):
        documents = stream.spans(epoch * TOKENS, TOKENS)[:, 0].tolist()
        groups = list(dict.fromkeys(GROUPS[document] for document in documents))
        assert documents == [
            document for group in groups for document, of in enumerate(GROUPS) if of == group and LENGTHS[document]
        ]
        orders.add(tuple(groups))
    assert len(orders) > 2, "groups are permuted anew in each epoch"


def test_where_no_document_has_a_group_each_is_one() -> None:
    stream = TokenStream(MemoryStore(LENGTHS), 11, seed=1, order="related")
    rows = stream.spans(0, TOKENS)
    assert sorted(rows.tolist()) == [[document, 0, length] for document, length in enumerate(LENGTHS) if length]
    assert rows[:, 0].tolist() != sorted(rows[:, 0])
