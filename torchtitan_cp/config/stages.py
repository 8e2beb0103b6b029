"""A stage of the curriculum as it runs on a number of ranks; `curriculum.resolve_stages` makes them."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_cp.config.data import ResolvedStageData
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.config.training import Activation

# What best_fit does with conversations, in text_settings. Checkpoints from when it cut some have no such entry.
CONVERSATIONS, KEPT_WHOLE, CUT = "conversations", "whole", "cut to fill sequences"


@dataclass(frozen=True, kw_only=True)
class ResolvedStage(Stage):
    """A stage with every default filled in, and what follows from the number of ranks.

    Attributes:
        index: in the curriculum, from 0.
        name: unique among the stages.
        seq_len: S, tokens of a sequence.
        degrees: of the mesh in this stage; cp, tp and pp are among them.
        strategy: name of the exchange, or `auto`.
        strategies: the exchange of the layers with each window, with `auto` resolved; 0: no window. Empty where no
            model is known.
        all_to_all_ranks: ranks that exchange heads; 1 except under hybrid.
        steps: optimizer steps, at most.
        micro_batch_sequences: sequences of one forward on one data-parallel rank.
        micro_batches: forwards of one optimizer step on one rank.
        activation: what is kept between forward and backward.
        rope: rotary embeddings; None: the model's own.
        global_batch_tokens: tokens of one optimizer step over all ranks.
        data: how the stage reads its text.
        resets_optimizer: the optimizer's moments start at zero.
        until: conditions that end the stage before its last step; see gate.
    """

    index: int
    degrees: Degrees
    cp: int
    tp: int
    pp: int
    strategy: str
    strategies: Mapping[int, str]
    all_to_all_ranks: int
    micro_batch_sequences: int
    micro_batches: int
    activation: Activation
    data: ResolvedStageData
    resets_optimizer: bool

    @property
    def dp(self) -> int:
        """Groups of cp ranks that hold different sequences."""
        return self.degrees.dp

    @property
    def round_tokens(self) -> int:
        """Tokens in one micro-batch of all ranks; those of a step are a multiple."""
        return self.seq_len * self.dp * self.micro_batch_sequences

    @property
    def where(self) -> str:
        """How messages name the table of this stage."""
        return f"curriculum.stages[{self.index}]"

    @property
    def rope_settings(self) -> dict[str, Any] | None:
        """`rope` as JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self.rope))) if self.rope else None

    @property
    def text_settings(self) -> dict[str, Any]:
        """The settings that decide which text each step of the stage reads, as JSON values."""
        text = {name: getattr(self.data, name) for name in ("mixture", "max_epochs", "packing", "packing_window")}
        if self.data.packing == "best_fit":  # the last window ends with the stage
            text["steps"] = self.steps
            if self.data.conversations:
                text[CONVERSATIONS] = KEPT_WHOLE
        return {"seq_len": self.seq_len, "global_batch_tokens": self.global_batch_tokens, **text}
