"""[[curriculum.stages]] resolved for a number of ranks."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from torchtitan_cp.config import Config
from torchtitan_cp.config.data import Data, ResolvedStageData
from torchtitan_cp.config.degrees import resolve_degrees
from torchtitan_cp.config.names import format_tokens
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.config.training import Activation


def resolve_stage_data(data: Data, stage: Stage) -> ResolvedStageData:
    """The keys of a stage's data: as the stage says, else as [data] says, else what suits the stage's sources."""
    stage_keys = dataclasses.asdict(stage.data)
    values = {name: getattr(data, name) if value is None else value for name, value in stage_keys.items()}
    mixture, sources = values["mixture"], data.by_name().items()
    chat = any(source.conversations for name, source in sources if not mixture or mixture.get(name))
    for name, default in {"packing": "best_fit" if chat else "concat", "document_mask": chat}.items():
        values[name] = default if values[name] is None else values[name]
    if values["restart_positions"] is None:
        values["restart_positions"] = chat and values["document_mask"]
    return ResolvedStageData(**values, max_epochs=data.max_epochs)


@dataclass(frozen=True, kw_only=True)
class ResolvedStage(Stage):
    """A stage with every default filled in, and what follows from the number of ranks.

    Attributes:
        index: in the curriculum, from 0.
        name: unique among the stages.
        seq_len: S, tokens of a sequence.
        cp: context-parallel degree.
        dp: groups of cp ranks that hold different sequences.
        strategy: name of the exchange.
        all_to_all_ranks: ranks that exchange heads; 1 except under hybrid.
        steps: optimizer steps, at most.
        micro_batch_sequences: sequences of one forward on one data-parallel rank.
        micro_batches: forwards of one optimizer step on one rank.
        tp, pp: tensor- and pipeline-parallel degrees.
        activation: what is kept between forward and backward.
        rope: rotary embeddings; None: the model's own.
        global_batch_tokens: tokens of one optimizer step over all ranks.
        data: how the stage reads its text.
        resets_optimizer: the optimizer's moments start at zero.
        until: conditions that end the stage before its last step; see gate.
    """

    index: int
    cp: int
    dp: int
    strategy: str
    all_to_all_ranks: int
    micro_batch_sequences: int
    micro_batches: int
    tp: int
    pp: int
    activation: Activation
    data: ResolvedStageData
    resets_optimizer: bool

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
        return {"seq_len": self.seq_len, "global_batch_tokens": self.global_batch_tokens, **text}


def resolve_stages(config: Config, ranks: int) -> tuple[ResolvedStage, ...]:
    """Resolve every stage of a config that has passed `check_config` for this number of ranks."""
    resolved: list[ResolvedStage] = []
    for index, stage in enumerate(config.curriculum.stages):
        degrees = resolve_degrees(config.parallel, ranks, stage)
        dp, micro = degrees.stage_dp(stage), config.training.micro_batch_sequences
        activation = {name: value for name, value in vars(stage.activation).items() if value is not None}
        cp, strategy = degrees.stage_cp(stage), stage.strategy or config.context_parallel.strategy
        name = stage.name or format_tokens(stage.seq_len)
        if name in {earlier.name for earlier in resolved}:
            name = f"{name}-stage-{index + 1}"
        values: dict[str, Any] = {
            "index": index,
            "name": name,
            "cp": cp,
            "dp": dp,
            "strategy": strategy,
            "all_to_all_ranks": config.context_parallel.all_to_all_ranks if strategy == "hybrid" and cp > 1 else 1,
            "steps": stage.most_steps,
            "until": {name: bound for name, bound in stage.until.items() if name != "max_tokens"},
            "micro_batch_sequences": micro,
            "micro_batches": stage.global_batch_tokens // (stage.seq_len * dp * micro),
            "tp": degrees.tp,
            "pp": degrees.pp,
            "activation": dataclasses.replace(config.activation, **activation),
            "data": resolve_stage_data(config.data, stage),
            "resets_optimizer": stage.optimizer_state == "reset",
        }
        resolved.append(ResolvedStage(**{**vars(stage), **values}))
    return tuple(resolved)
