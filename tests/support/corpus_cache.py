"""A corpus that is prepared, and its folder in the cache."""

from pathlib import Path

import numpy as np

from tests.support.texts import read
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.cache import PreparedCorpus, PreparedSource
from torchtitan_cp.data.corpus.store import TokenStore

BYTES = TokenizerConfig(kind="bytes")


def data_of(corpus: Path, cache_folder: Path, validation_fraction: float = 0.2, document: str = "file") -> Data:
    return Data(
        source="text",
        path=str(corpus),
        cache_folder=str(cache_folder),
        validation_fraction=validation_fraction,
        document=document,
    )


def contents(store: TokenStore) -> list[list[int]]:
    return [store.read(index, 0, length).tolist() for index, length in enumerate(store.document_lengths)]


def finished(data: Data) -> list[Path]:
    return [path.parent for path in Path(data.cache_folder).glob("*/manifest.json")]


def partial(data: Data) -> list[Path]:
    return list(Path(data.cache_folder).glob("*.partial"))


def only(prepared: PreparedCorpus) -> PreparedSource:
    [source] = prepared.sources.values()
    return source


def assert_is_the_corpus(prepared: PreparedCorpus, data: Data) -> None:
    documents = read(data)
    for store, held_out in ((only(prepared).train, False), (only(prepared).validation, True)):
        texts = [document.content for document in documents if document.held_out == held_out]
        rows = contents(store)
        assert [prepared.tokenizer.decode(row) for row in rows] == texts != []
        assert all(row[-1] == prepared.tokenizer.eos_id and row.count(row[-1]) == 1 for row in rows)
        assert store.tokens == sum(map(len, rows))
    every = np.concatenate(contents(only(prepared).train))
    np.testing.assert_array_equal(prepared.unigram_counts, np.bincount(every, minlength=prepared.tokenizer.vocab_size))
