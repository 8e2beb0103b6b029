"""Sums of losses on held-out text: by source and position, by turn, and for context gain."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.micro_batches import MicroBatch
from torchtitan_cp.data.batches.samples import StageSamples
from torchtitan_cp.metrics.loss_breakdown import bin_starts, sum_by_bin, sum_by_index

TURNS = 5  # turns of a conversation that are told apart; the fifth includes all later ones


class HeldOutLosses(NamedTuple):
    """Sums over held-out text, of all ranks.

    Attributes:
        sources: names.
        starts: first position of each bin.
        by_bin: `[sources, 2, bins]` fp64, (sum of losses, tokens) by source and position.
        late: `[2]` fp64, (sum of losses, tokens) of the tokens that context gain compares.
        by_turn: `[2, TURNS]` fp64, (sums of losses, tokens) of conversations that are read from their beginning.
        label_counts: `[V]` int64, how often each token of the tokenizer is a label.
        epochs: how often each source's held-out text was read; 0: the source got no sequence.
    """

    sources: list[str]
    starts: list[int]
    by_bin: Tensor
    late: Tensor
    by_turn: Tensor
    label_counts: Tensor
    epochs: dict[str, float]

    @property
    def loss(self) -> float:
        """Mean loss of all tokens."""
        return float(means(self.by_bin.sum((0, 2))))

    @property
    def by_source(self) -> dict[str, float]:
        """Mean loss of the tokens of each source that has any."""
        found = zip(self.sources, means(self.by_bin.sum(2).T), strict=True)
        return {name: loss for name, loss in found if not math.isnan(loss)}


def means(sums: Tensor) -> Any:
    """Means of `[2, ...]`, (sums, tokens), as plain numbers; NaN where there are no tokens."""
    return (sums[0] / sums[1]).tolist()


class LossSums:
    """This rank's sums of the losses of a held-out pass.

    Args:
        samples: the sequences that are read.
        count: how many there are; behind them the last is repeated, without labels.
        block_tokens: of evaluation.context_gain_tokens; 0: context gain is not measured.
        vocab_size: of the tokenizer.
    """

    def __init__(
        self, samples: StageSamples, seq_len: int, count: int, block_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        self.samples, self.seq_len, self.count, self.block_tokens = samples, seq_len, count, block_tokens
        self.sources, self.starts = list(samples.packed), bin_starts(seq_len)
        self.by_bin = torch.zeros(len(self.sources), 2, len(self.starts), dtype=torch.float64, device=device)
        self.late, self.by_turn = self.by_bin.new_zeros(2), self.by_bin.new_zeros(2, TURNS)
        self.label_counts = torch.zeros(vocab_size, dtype=torch.int64, device=device)

    def add(self, batch: MicroBatch, losses: Tensor) -> None:
        """Add a micro-batch: losses `[B, s]` of this rank's tokens."""
        positions = batch.plan.layout.positions(batch.plan.rank, losses.device)
        labels = batch.labels.to(losses.device)
        counted = labels != IGNORED
        self.label_counts += torch.bincount(labels[counted], minlength=len(self.label_counts))
        for row, source in enumerate(batch.sources):
            in_bins = sum_by_bin(losses[row], counted[row], positions, self.seq_len)
            self.by_bin[self.sources.index(source)] += in_bins
            if self.samples.packed[source].stream.store.has_masks:
                turns_full = self.samples.sequence(min(batch.numbers[row], self.count - 1)).turns
                turns = batch.plan.shard(torch.from_numpy(turns_full), dim=0).to(losses.device)
                has_turn = counted[row] & (turns >= 0)
                self.by_turn += sum_by_index(losses[row] * has_turn, has_turn, turns.clamp(0, TURNS - 1), TURNS)
        if block := self.block_tokens:  # second halves of all blocks but the first: they see half a block at least
            is_late = counted & (positions >= block) & (positions % block >= block // 2)
            self.late += torch.stack([(losses.double() * is_late).sum(), is_late.double().sum()])

    def over_ranks(self) -> HeldOutLosses:
        """The sums of all ranks. Collective."""
        sums = (self.by_bin, self.late, self.by_turn, self.label_counts)
        for total in sums:
            dist.all_reduce(total)
        by_bin, late, by_turn, label_counts = (total.cpu() for total in sums)
        epochs = self.samples.epochs_after(1)
        return HeldOutLosses(self.sources, self.starts, by_bin, late, by_turn, label_counts, epochs)
