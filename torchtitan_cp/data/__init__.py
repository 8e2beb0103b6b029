"""From a corpus to an endless stream of tokens: find the text, tokenize it once onto disk, read it at any cursor.

May import `config` and `attention` at most; ranks and degrees come in as integers, never as groups. Only `loader`
imports torch, and it is not imported here, so that a check of a config stays cheap.
"""

from torchtitan_cp.data.batches.stream import SeparatedStore, TokenStream
from torchtitan_cp.data.corpus.cache import PreparedCorpus, PreparedSource, prepare
from torchtitan_cp.data.corpus.documents import Corpus, Document, check_corpus
from torchtitan_cp.data.corpus.statistics import SourceStatistics, statistics_table
from torchtitan_cp.data.corpus.store import TokenStore
from torchtitan_cp.data.corpus.tokenizer import Tokenizer, check_tokenizer, load_tokenizer
from torchtitan_cp.data.corpus.vocabulary import train_sentencepiece
from torchtitan_cp.data.errors import DataError

__all__ = [
    "Corpus",
    "DataError",
    "Document",
    "PreparedCorpus",
    "PreparedSource",
    "SeparatedStore",
    "SourceStatistics",
    "TokenStore",
    "TokenStream",
    "Tokenizer",
    "check_corpus",
    "check_tokenizer",
    "load_tokenizer",
    "prepare",
    "statistics_table",
    "train_sentencepiece",
]
