"""Documents as token ids, without a cache."""

from collections.abc import Iterable, Iterator

import numpy as np

from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.encoding import Encoder, tokenize
from torchtitan_cp.data.corpus.records import Document, SkippedRecords
from torchtitan_cp.data.corpus.tokenizer import Tokenizer


def encode_all(
    documents: Iterable[Document], tokenizer: Tokenizer, data: Data | None = None
) -> Iterator[tuple[Document, np.ndarray, np.ndarray | None]]:
    """Each document with its ids and mask, made by this process; `data` is the source of a corpus without template."""
    return tokenize(documents, Encoder(tokenizer, data or Data(), None), SkippedRecords(), TokenizerConfig(), 1)
