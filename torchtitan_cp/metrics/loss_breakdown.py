"""Losses of a step's tokens by where they stand and where they come from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_cp.metrics.positions import bin_starts, sum_by_bin, sum_by_index


@dataclass(frozen=True)
class LossDetails:
    """Mean losses in nats a token; what no token is in is left out.

    Attributes:
        by_position: by the first position of each bin of the sequence; by_document_position: of the document.
        by_source: by the source's name.
        tokens: that count.
    """

    by_position: dict[str, float]
    by_document_position: dict[str, float]
    by_source: dict[str, float]
    tokens: int


class LossBreakdown:
    """Adds up the losses of one step on this rank.

    Args:
        seq_len: S.
        sources: names of all.
        device: of the losses.

    Attributes:
        sums: `[2, bins + bins + sources]` fp64, (sum, count): summed over the ranks they are those of the step.
    """

    def __init__(self, seq_len: int, sources: Sequence[str], device: torch.device) -> None:
        self.seq_len, self.starts, self.sources = seq_len, bin_starts(seq_len), list(sources)
        self.sums = torch.zeros(2, 2 * len(self.starts) + len(self.sources), dtype=torch.float64, device=device)

    def add(
        self, losses: Tensor, counted: Tensor, positions: Tensor, document_positions: Tensor, sources: Sequence[str]
    ) -> None:
        """Count the tokens of a micro-batch.

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

    def details(self) -> LossDetails:
        """What the sums say."""
        bins, means = (
            len(self.starts),
            [total / count if count else None for total, count in zip(*self.sums.tolist(), strict=True)],
        )
        names = [str(start) for start in self.starts]

        def known(keys: Sequence[str], values: Sequence[float | None]) -> dict[str, float]:
            return {key: value for key, value in zip(keys, values, strict=True) if value is not None}

        return LossDetails(
            known(names, means[:bins]),
            known(names, means[bins : 2 * bins]),
            known(self.sources, means[2 * bins :]),
            int(self.sums[1, :bins].sum()),
        )
