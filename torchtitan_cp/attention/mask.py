"""What may attend to what: causal order and the documents packed into a sequence."""

from dataclasses import dataclass

from torchtitan_cp.attention.errors import PlanError

UNBOUNDED = (-1, -1)


@dataclass(frozen=True)
class AttentionMask:
    """Which query may see which key, as plain hashable data.

    Attributes:
        causal: a query sees keys at its own position and before.
        window: (left, right) tokens beside the query; -1 is unbounded.
        document_lengths: per batch row, the lengths of the packed documents, which sum to the sequence
            length; a query sees its own document only. None: each row is one document. One row stands
            for a batch of any size.
    """

    causal: bool = True
    window: tuple[int, int] = UNBOUNDED
    document_lengths: tuple[tuple[int, ...], ...] | None = None

    def documents(self, sequence_length: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per batch row, the (start, stop) of each document, in global positions.

        Raises:
            PlanError: lengths below 1, or that do not sum to `sequence_length`.
        """
        rows = self.document_lengths
        if rows is None:
            return (((0, sequence_length),),)
        if not rows:
            raise PlanError("document_lengths has no batch row", fix="give one tuple of lengths per row, or None")
        return tuple(_spans(lengths, sequence_length, row) for row, lengths in enumerate(rows))


def _spans(lengths: tuple[int, ...], sequence_length: int, row: int) -> tuple[tuple[int, int], ...]:
    if any(length < 1 for length in lengths) or sum(lengths) != sequence_length:
        raise PlanError(
            f"document_lengths of batch row {row} sum to {sum(lengths)} with a shortest of {min(lengths, default=0)}",
            fix=f"give lengths of at least 1 that sum to seq_len = {sequence_length}",
        )
    spans, start = [], 0
    for length in lengths:
        spans.append((start, start + length))
        start += length
    return tuple(spans)
