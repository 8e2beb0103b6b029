"""What is measured between steps, on held-out text, and whether a stage's gate opens on it."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.config.sections import Evaluation
from torchtitan_cp.curriculum import StagePlan, judge
from torchtitan_cp.curriculum.gate import Verdict
from torchtitan_cp.data.loader import MicroBatch, StepShape
from torchtitan_cp.evaluation import mean_loss, unigram_loss
from torchtitan_cp.network import Network
from torchtitan_cp.optimizer import IGNORED
from torchtitan_cp.reading import Reading, labels_of_rounds, rows_of_round


class Validation(NamedTuple):
    """Mean loss on held-out text, in nats, beside a unigram model's on the same tokens."""

    loss: float
    unigram: float


class Measuring:
    """Looks at the network between steps, and changes nothing.

    Args:
        network, reading: of the run, in the stage at hand.
        settings: [evaluation].
        shortest: tokens of a sequence of the curriculum's shortest stage.
        busy: told what this rank begins, in words that fit behind "rank 3 is".
    """

    def __init__(
        self, network: Network, reading: Reading, settings: Evaluation, shortest: int, busy: Callable[[str], None]
    ) -> None:
        self.network, self.reading, self.settings = network, reading, settings
        self.shortest, self.busy = shortest, busy

    def validate(self, shape: StepShape) -> Validation | None:
        """On held-out text of the stage's sources; None without such text. Collective.

        Args:
            shape: gives the length, and who reads what. At least one round on all ranks is read.
        """
        shape = dataclasses.replace(shape, micro_batches=1)
        samples = self.reading.held_out_samples(shape)
        if samples is None:
            return None
        rounds = max(1, self.settings.tokens // shape.tokens)
        batches = (rows_of_round(samples, shape, number) for number in range(rounds))
        loss = mean_loss(self.network.parts, batches, self._summed)
        return Validation(
            loss, unigram_loss(self.reading.corpus.unigram_counts, labels_of_rounds(samples, shape, rounds))
        )

    def validate_short(self, shape: StepShape) -> float | None:
        """The loss at the length of the curriculum's shortest stage. Collective."""
        found = self.validate(dataclasses.replace(shape, seq_len=self.shortest))
        return found.loss if found else None

    def judge(self, stage: StagePlan, shape: StepShape, loss: float, short_before: float | None) -> Verdict:
        """Whether the stage's gate opens. Collective.

        Args:
            loss: of the newest validation.
            short_before: `validate_short` as the stage began.
        """
        measured = {"validation_loss": loss}
        if "short_loss_rise" in stage.until and short_before is not None:
            short = self.validate_short(shape)
            if short is not None:
                measured["short_loss_rise"] = short / short_before - 1
        return judge(stage.until, measured)

    def _summed(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        self.busy("validating with the others")
        meshes = self.network.meshes
        count = (batch.labels != IGNORED).sum().to(self.network.device)
        losses = self.network.token_losses(batch)
        loss = torch.zeros_like(count) if losses is None else losses.sum()
        return loss * meshes.counts_losses, count * meshes.counts_tokens
