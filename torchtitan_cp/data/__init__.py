"""From a corpus to packed sequences: find the text, tokenize it once onto disk, read it from any cursor.

May import `config` and `attention` at most; ranks and degrees are integers here, never groups. Only `batches.loader`
imports torch, and it is not imported here, so that checking a config stays cheap.
"""

from torchtitan_cp.data.corpus.cache import CacheBuilder, PreparedCorpus, open_cache, prepare
from torchtitan_cp.data.corpus.documents import check_corpus
from torchtitan_cp.data.corpus.statistics import statistics_table
from torchtitan_cp.data.corpus.tokenizer import check_tokenizer
from torchtitan_cp.data.errors import DataError, PreparationStoppedError

__all__ = [
    "CacheBuilder",
    "DataError",
    "PreparationStoppedError",
    "PreparedCorpus",
    "check_corpus",
    "check_tokenizer",
    "open_cache",
    "prepare",
    "statistics_table",
]
