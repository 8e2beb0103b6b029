"""What an evaluation has time for, and what it leaves out."""

import torch
import torch.distributed as dist

from torchtitan_cp.evaluation.held_out import Budget
from torchtitan_cp.runtime.signals import any_rank

WITHIN_STAGE_PART = 0.5  # of evaluation.max_share, so that the ends of stages find time left


class EvaluationTime:
    """Decides what an evaluation measures, by rank 0's clock, and notes what it does not.

    Args:
        max_share: of the run's time, evaluation.max_share.
        device: of this rank's model.

    Attributes:
        budget: limits the time of evaluations; the trainer adds the time of training to it.
        left_out: what the current evaluation had no time or no room for.
    """

    def __init__(self, max_share: float, device: torch.device) -> None:
        self.budget, self.device, self.left_out = Budget(max_share), device, list[str]()
        self._part, self._late_tokens = 1.0, 0

    def begin(self, *, within_stage: bool) -> None:
        """Begin an evaluation; one within a stage may use a part of max_share."""
        self.left_out.clear()
        self._part, self._late_tokens = WITHIN_STAGE_PART if within_stage else 1.0, 0

    def affords(self, tokens: int) -> bool:
        """Whether there is time for this many tokens. Collective."""
        affords = dist.get_rank() == 0 and self.budget.affords(tokens, self._part)
        return any_rank(affords, device=self.device)[0]

    def is_due(self, measure: str, for_gate: bool = False, *, tokens: int, later_tokens: int = 0) -> bool:
        """Whether the gate needs a measurement or there is time for its tokens; if not, note that. Collective.

        Args:
            later_tokens: of the measurement, beyond these.
        """
        due = for_gate or self.affords(tokens)
        if not due:
            self._late_tokens += tokens + later_tokens
            self.left_out.append(f"{measure} ({self.wanted_share(self._late_tokens)})")
        return due

    def wanted_share(self, tokens: int) -> str:
        """The limit of time, and the one that this many more tokens would have needed."""
        share = min(1.0, self.budget.share_with(tokens) / self._part)
        return f"evaluation.max_share = {self.budget.max_share:g}, where {share:.2g} would have included it"
