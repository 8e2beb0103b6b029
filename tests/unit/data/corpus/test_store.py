"""Tokens on disk: what is written is read, across files."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_cp.data.corpus.store import TokenStore, append_documents, token_dtype

FINGERPRINT = "847eb13461b09f29c8dd2e3a7c8802f1fdf0102411a437a05a55457fe38d92d0"
DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]


def write(
    folder: Path,
    documents: list[list[int]],
    vocab_size: int = 100,
    shard_bytes: int = 8,
    groups: list[int] | None = None,
) -> str:
    folder.mkdir(exist_ok=True)
    numbered = [(np.array(document), groups[n] if groups else n) for n, document in enumerate(documents)]
    for first in range(0, max(1, len(numbered)), 2):
        append_documents(folder, "train", vocab_size, numbered[first : first + 2], shard_bytes)
    store = TokenStore(folder, "train", vocab_size)
    fingerprint, unigram_counts = store.summarize(lambda: None)
    assert store.tokens == sum(map(len, documents)) == unigram_counts.sum()
    return fingerprint


@settings(deadline=None)
@given(st.data())
def test_any_part_of_any_document_is_read_across_files(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("store")
    documents = data.draw(st.lists(st.lists(st.integers(0, 99), max_size=20), max_size=6))
    vocab_size = data.draw(st.sampled_from([100, 1 << 17]))
    write(folder, documents, vocab_size)
    store = TokenStore(folder, "train", vocab_size)
    assert (store.documents, store.tokens) == (len(documents), sum(map(len, documents)))
    assert store.document_lengths.tolist() == [len(document) for document in documents]
    for index, document in enumerate(documents):
        start = data.draw(st.integers(0, len(document)))
        stop = data.draw(st.integers(start, len(document)))
        tokens = store.read(index, start, stop)
        assert tokens.dtype == np.int64
        assert tokens.tolist() == document[start:stop]


def test_files_are_full_but_the_last(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS)
    assert [path.stat().st_size for path in sorted(tmp_path.glob("train-*.bin"))] == [8, 8, 8, 2]


def test_the_dtype_is_the_smallest_that_holds_the_vocabulary() -> None:
    assert (token_dtype(65536), token_dtype(65537)) == (np.dtype("<u2"), np.dtype("<u4"))


def test_an_empty_split_can_be_opened(tmp_path: Path) -> None:
    write(tmp_path, [])
    store = TokenStore(tmp_path, "train", 100)
    assert (store.documents, store.tokens, len(store.document_lengths)) == (0, 0, 0)


def test_a_store_keeps_eight_bytes_a_document_in_memory(tmp_path: Path) -> None:
    documents = 20_000
    append_documents(tmp_path, "train", 100, [(np.array([1]), 0)] * documents)
    tracemalloc.start()
    store = TokenStore(tmp_path, "train", 100)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert store.documents == documents
    assert kept_bytes < 9 * documents


def test_the_digest_follows_tokens_document_ends_and_groups(tmp_path: Path) -> None:
    folders = (tmp_path / str(index) for index in range(9))
    first = write(next(folders), [[1, 2], [3]])
    assert write(next(folders), [[1, 2], [3]]) == first
    assert write(next(folders), [[1, 2], [4]]) != first
    assert write(next(folders), [[1], [2, 3]]) != first
    assert write(next(folders), [[1, 2], [3]], groups=[5, 5]) != first


def test_groups_are_kept(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS, groups=[3, 1, 3, 0, 1])
    assert TokenStore(tmp_path, "train", 100).groups.tolist() == [3, 1, 3, 0, 1]


def test_the_fingerprint_of_a_format_never_changes(tmp_path: Path) -> None:
    """It is part of a checkpoint's identity: a run begun before must resume."""
    assert write(tmp_path, DOCUMENTS, groups=[3, 1, 3, 0, 1]) == FINGERPRINT


masks = st.lists(st.booleans(), min_size=1, max_size=60).map(lambda bits: np.array(bits, dtype=bool))


@settings(max_examples=25, deadline=None)
@given(st.lists(masks, max_size=8), st.data())
def test_masks_are_read_back_from_any_place(tmp_path_factory: pytest.TempPathFactory, every: Any, data: Any) -> None:
    folder = tmp_path_factory.mktemp("store")
    for masks_of_commit in (every[:3], every[3:]):
        documents = [(np.arange(len(mask)), 0) for mask in masks_of_commit]
        append_documents(folder, "train", 100, documents, shard_bytes=16, masks=masks_of_commit)
    store = TokenStore(folder, "train", 100)
    assert store.has_masks
    assert (folder / "train.mask.bin").stat().st_size == sum(-(-len(mask) // 8) for mask in every)
    for document, mask in enumerate(every):
        start = data.draw(st.integers(0, len(mask)))
        stop = data.draw(st.integers(start, len(mask)))
        np.testing.assert_array_equal(store.read_mask(document, start, stop), mask[start:stop])


def test_a_store_of_text_has_no_masks(tmp_path: Path) -> None:
    append_documents(tmp_path, "train", 100, [(np.arange(5), 0)])
    store = TokenStore(tmp_path, "train", 100)
    assert not store.has_masks
    assert store.read_mask(0, 0, 5) is None
