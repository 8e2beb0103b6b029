"""The lengths of a source's documents, which decide the context lengths that it can teach."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

TABLE_COLUMNS = 140
# Kinds of conversations that are counted, beside those that cannot be read.
CONVERSATION_COUNTS = ("conversation longer than max_document", "cut in a turn that is learned", "nothing to learn")
UNKNOWN = "token for text that the tokenizer does not know"
LONG_TOKENS = {"4K": 4096, "32K": 32768, "128K": 131072}


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths of the documents of one split, in tokens, including the token that ends each.

    Attributes:
        documents, tokens: their numbers.
        mean, p50, p90, p99, longest: in tokens, 0 without documents; a percentile is the length of a document.
        long_fraction: fraction of the tokens that are in documents of at least 4K, 32K and 128K tokens.
    """

    documents: int
    tokens: int
    mean: float
    p50: int
    p90: int
    p99: int
    longest: int
    long_fraction: dict[str, float]

    @classmethod
    def of(cls, lengths: np.ndarray) -> "LengthStatistics":
        """The statistics of lengths `[documents]` int64."""
        tokens = int(lengths.sum())
        measured = lengths if len(lengths) else np.zeros(1, dtype=np.int64)
        p50, p90, p99 = (int(length) for length in np.percentile(measured, (50, 90, 99), method="inverted_cdf"))
        long_fraction = {
            name: float(lengths[lengths >= least].sum() / max(1, tokens)) for name, least in LONG_TOKENS.items()
        }
        return cls(len(lengths), tokens, float(measured.mean()), p50, p90, p99, int(measured.max()), long_fraction)


@dataclass(frozen=True)
class SourceStatistics:
    """What became of one source's text.

    Attributes:
        train, validation: lengths of the documents that are kept.
        left_out_documents, left_out_tokens: documents of fewer than min_document tokens.
        split_documents: documents of more than max_document tokens, before they were split.
        skipped_records: number of records that could not be read, of conversations that were cut or have nothing to
            learn, and of tokens for unknown text, by kind.
    """

    train: LengthStatistics
    validation: LengthStatistics
    left_out_documents: int
    left_out_tokens: int
    split_documents: int
    skipped_records: dict[str, int]

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> "SourceStatistics":
        """The inverse of dataclasses.asdict, by position: in older caches the last field has another name."""
        fields: list[Any] = [*values.values()]
        train, validation, *counts = fields
        return cls(LengthStatistics(**train), LengthStatistics(**validation), *counts)

    def left_out(self) -> str:
        """What of the corpus is left out or cut, e.g. `; left out or cut: 7 x malformed JSON`; empty if nothing is."""
        counts = dict(sorted(self.skipped_records.items()))
        if self.left_out_documents:
            counts[f"shorter than min_document ({self.left_out_tokens} tokens)"] = self.left_out_documents
        parts = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
        return f"; left out or cut: {parts}" if parts else ""


def statistics_table(sources: Mapping[str, SourceStatistics]) -> str:
    """Lines of a table of each source's training documents, for a terminal or a log."""
    title = "Documents to train on, lengths in tokens (≥4K: share of tokens in such ones)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("source", overflow="fold")
    longer = [f"≥{name}" for name in LONG_TOKENS]
    for header in ("docs", "tokens", "mean", "p50", "p90", "p99", "longest", *longer, "held out"):
        table.add_column(header, justify="right")
    for name, statistics in sources.items():
        train = statistics.train
        counts = (train.documents, train.tokens, round(train.mean), train.p50, train.p90, train.p99, train.longest)
        fractions = (f"{fraction:.1%}" for fraction in train.long_fraction.values())
        table.add_row(name, *(f"{count:,}" for count in counts), *fractions, f"{statistics.validation.tokens:,}")
    lines = io.StringIO()
    Console(file=lines, width=TABLE_COLUMNS).print(table)
    return "\n".join(line.rstrip() for line in lines.getvalue().splitlines() if line.strip())
