"""[[curriculum.stages]] resolved for a number of ranks: the one place where a stage's key falls back to a section's."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan_cp.config import Config
from torchtitan_cp.config.check import check_stage_keys, check_stages
from torchtitan_cp.config.data import Data, ResolvedStageData
from torchtitan_cp.config.degrees import Degrees, resolve_degrees
from torchtitan_cp.config.names import format_tokens
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.config.stages import ResolvedStage

ChooseStrategies = Callable[[Degrees], Mapping[int, str]]
"""What strategy = "auto" takes at these degrees, for the layers of a model with each window; 0: no window."""


def without_model(degrees: Degrees) -> dict[int, str]:
    """A ChooseStrategies where no model is known."""
    return {}


def resolve_stages(config: Config, ranks: int, choose: ChooseStrategies = without_model) -> tuple[ResolvedStage, ...]:
    """Resolve every stage of a config for a number of ranks.

    Args:
        choose: says which windows the model's layers have, and what `auto` is for them.

    Raises:
        ConfigError: there is no stage, one lacks a key that has no default, or its degrees do not fit the ranks.
    """
    check_stages(config)
    resolved: list[ResolvedStage] = []
    for index, stage in enumerate(config.curriculum.stages):
        where = f"curriculum.stages[{index}]"
        check_stage_keys(stage, where)
        degrees, micro = resolve_degrees(config.parallel, ranks, stage, where), config.training.micro_batch_sequences
        activation = {name: value for name, value in vars(stage.activation).items() if value is not None}
        strategy, auto = stage.strategy or config.context_parallel.strategy, choose(degrees)
        trading = config.context_parallel.all_to_all_ranks if strategy == "hybrid" and degrees.cp > 1 else 1
        name = stage.name or format_tokens(stage.seq_len)
        if name in {earlier.name for earlier in resolved}:
            name = f"{name}-stage-{index + 1}"
        values: dict[str, Any] = {
            "index": index,
            "name": name,
            "degrees": degrees,
            "cp": degrees.cp,
            "tp": degrees.tp,
            "pp": degrees.pp,
            "strategy": strategy,
            "strategies": auto if strategy == "auto" else dict.fromkeys(auto, strategy if degrees.cp > 1 else "ring"),
            "all_to_all_ranks": trading,
            "steps": stage.most_steps,
            "until": {name: bound for name, bound in stage.until.items() if name != "max_tokens"},
            "micro_batch_sequences": micro,
            "micro_batches": stage.global_batch_tokens // (stage.seq_len * degrees.dp * micro),
            "activation": dataclasses.replace(config.activation, **activation),
            "data": resolve_stage_data(config.data, stage),
            "resets_optimizer": stage.optimizer_state == "reset",
        }
        resolved.append(ResolvedStage(**{**vars(stage), **values}))
    return tuple(resolved)


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
    return ResolvedStageData(**values, max_epochs=data.max_epochs, conversations=chat)
