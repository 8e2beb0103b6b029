"""Mean loss by position in the sequence and in the document, in bins by powers of two, and by source."""

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_BIN_TOKENS = 16


def bin_starts(seq_len: int) -> list[int]:
    """First position of each bin of a sequence of S tokens: 0, 16, 32, 64, … below S."""
    edges = (FIRST_BIN_TOKENS << power for power in range(seq_len.bit_length()))
    return [0, *(edge for edge in edges if edge < seq_len)]


def sum_by_bin(losses: Tensor, counted: Tensor, positions: Tensor, seq_len: int) -> Tensor:
    """Sum the losses and count the tokens of each bin. Results of ranks and micro-batches can be added up.

    Args:
        losses: of each token, `[B, S/cp]`, 0 where not counted.
        counted: `[B, S/cp]` bool, tokens that have a label.
        positions: `[S/cp]` or `[B, S/cp]` int64, below `seq_len`.

    Returns:
        `[2, bins]` fp64, (sum, count), on the device of `losses`.
    """
    # frexp(n).exponent is the number of binary digits of n. To look a position up in a table of bins, the table would
    # have to be copied to the device, and the host would wait for the copy.
    bins = torch.frexp((positions // FIRST_BIN_TOKENS).double()).exponent.long()
    return sum_by_index(losses, counted, bins, len(bin_starts(seq_len)))


def sum_by_index(losses: Tensor, counted: Tensor, index: Tensor, size: int) -> Tensor:
    """As sum_by_bin for any index, `[S/cp]` or `[B, S/cp]` int64 below `size`: `[2, size]` fp64.

    On CUDA, index_add_ does not synchronize and has a deterministic form; bincount does and has none.
    """
    pairs = torch.stack([losses.double().flatten(), counted.double().flatten()])
    return pairs.new_zeros(2, size).index_add_(1, index.expand(losses.shape).flatten(), pairs)


class LossBreakdown:
    """Sums the losses of this rank's tokens.

    Args:
        seq_len: S.
        sources: names of all sources.
        device: where losses are added up, so that no step waits for the host.

    Attributes:
        sums: `[2, bins + bins + sources]` fp64, (sum, count); the sum over all ranks covers the whole step.
    """

    def __init__(self, seq_len: int, sources: Sequence[str], device: torch.device) -> None:
        self.seq_len, self.sources, bins = seq_len, list(sources), [str(start) for start in bin_starts(seq_len)]
        groups = {"loss_by_position": bins, "loss_by_document_position": bins, "loss_by_source": self.sources}
        self.columns = [(group, name) for group, names in groups.items() for name in names]
        self.sums = torch.zeros(2, len(self.columns), dtype=torch.float64, device=device)

    def add(
        self, losses: Tensor, counted: Tensor, positions: Tensor, document_positions: Tensor, sources: Sequence[str]
    ) -> None:
        """Add the tokens of a micro-batch.

        Args:
            losses: `[B, S/cp]`, 0 where not counted; counted: `[B, S/cp]` bool.
            positions: `[S/cp]` int64, in the sequence; document_positions: `[B, S/cp]`, in the document.
            sources: the source of each row.
        """
        # Filled on the device, because the host would wait for a copy.
        rows = torch.cat([positions.new_full((1, 1), self.sources.index(source)) for source in sources])
        self.sums += torch.cat(
            [
                sum_by_bin(losses, counted, positions, self.seq_len),
                sum_by_bin(losses, counted, document_positions, self.seq_len),
                sum_by_index(losses, counted, rows, len(self.sources)),
            ],
            dim=1,
        )

    def means(self) -> dict[str, dict[str, float]]:
        """Mean losses in nats, by field of StepRecord, then by first position of a bin or by source.

        Bins and sources without tokens are left out.
        """
        means: dict[str, dict[str, float]] = {group: {} for group, _ in self.columns}
        for (group, name), total, count in zip(self.columns, *self.sums.tolist(), strict=True):
            if count:
                means[group][name] = total / count
        return means
