"""Mean loss of a step's tokens by position in the sequence, by position in the document, and by source."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_cp.metrics.positions import bin_starts, sum_by_bin, sum_by_index


class LossBreakdown:
    """Sums the losses of this rank's tokens.

    Args:
        seq_len: S.
        sources: names of all.
        device: of the losses.

    Attributes:
        sums: `[2, bins + bins + sources]` fp64, (sum, count): added up over ranks they are those of the step.
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
            sources: of each row.
        """
        rows = torch.tensor([self.sources.index(source) for source in sources], device=losses.device)
        self.sums += torch.cat(
            [
                sum_by_bin(losses, counted, positions, self.seq_len),
                sum_by_bin(losses, counted, document_positions, self.seq_len),
                sum_by_index(losses, counted, rows.unsqueeze(1), len(self.sources)),
            ],
            dim=1,
        )

    @property
    def tokens(self) -> int:
        """Tokens counted."""
        return int(self.sums[1, : len(bin_starts(self.seq_len))].sum())

    def means(self) -> dict[str, dict[str, float]]:
        """Mean losses in nats, by field of StepRecord, then by first position of a bin or by source.

        Bins and sources without tokens are left out.
        """
        found: dict[str, dict[str, float]] = {group: {} for group, _ in self.columns}
        for (group, name), total, count in zip(self.columns, *self.sums.tolist(), strict=True):
            if count:
                found[group][name] = total / count
        return found
