"""Where a run begins: at its newest checkpoint, with the weights of a Hugging Face checkpoint, or with fresh ones."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torchtitan_cp.checkpoint.hub_rope import rope_changes
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.progress import Progress, check_identity
from torchtitan_cp.checkpoint.weights import load_weights, open_saved_model
from torchtitan_cp.config import Config, ConfigError, load_config
from torchtitan_cp.config.check import shortened_warmups
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.config.json_types import JsonObject
from torchtitan_cp.config.run_folder import RUN_CONFIG
from torchtitan_cp.config.stages import CONVERSATIONS, CUT
from torchtitan_cp.curriculum import ResolvedStage
from torchtitan_cp.data.corpus.cache import PreparedCorpus
from torchtitan_cp.optim.optimizers import OPTIMIZERS
from torchtitan_cp.runtime.consistency import flatten
from torchtitan_cp.training import registry
from torchtitan_cp.training.adapters import adapter_identity, load_base, load_initial_adapter, starts_from_weights
from torchtitan_cp.training.model import ParallelModel
from torchtitan_cp.training.preflight import check_hub_tokenizer
from torchtitan_cp.training.rope_log import log_rope_notes

logger = logging.getLogger(__name__)

MODEL_ROPE = "the model's own"
Stages = tuple[ResolvedStage, ...]
Saved = tuple[Path, Progress]  # a checkpoint's folder, and where its run stood


def is_stage_trained(progress: Progress, stages: Stages) -> bool:
    """Whether no step is left of the current stage."""
    return progress.stage_done or progress.stage_step >= stages[progress.stage].steps


def is_stage_evaluated(progress: Progress, stages: Stages) -> bool:
    """Whether no step is left of the current stage, and its evaluation is over."""
    return is_stage_trained(progress, stages) and progress.evaluated_step == progress.step


def count_steps(progress: Progress, stages: Stages) -> int:
    """Optimizer steps of the whole run: those taken, and those left of the current stage and after it."""
    left = 0 if is_stage_trained(progress, stages) else stages[progress.stage].steps - progress.stage_step
    return progress.step + left + sum(later.steps for later in stages[progress.stage + 1 :])


def find_first_stage(saved: Saved | None, stages: Stages) -> ResolvedStage:
    """The stage in which training begins or resumes, whose tp and pp this process keeps to its end.

    Raises:
        ConfigError: the checkpoint was written in a stage that the config does not have.
    """
    if saved is None:
        return stages[0]
    path, progress = saved
    if progress.stage >= len(stages):
        raise ConfigError(
            f"{path} was written in stage {progress.stage + 1}, and the config has {len(stages)}",
            fix="put the stages back, or give the new run a folder of its own: --job.dump_folder=...",
        )
    return stages[min(progress.stage + is_stage_evaluated(progress, stages), len(stages) - 1)]


def identity_of(config: Config, args: ModelArgs, tp: int) -> JsonObject:
    """What must be the same to resume a run, apart from its data. The weights beside adapters are read for it.

    Args:
        args: with the vocabulary set, as its sizes are compared.
        tp: tensor-parallel degree of the first stage.
    """
    return {
        "model": registry.sizes_of(args),
        "seed": config.training.seed,
        **adapter_identity(config),
        **OPTIMIZERS[config.optimizer.name].identity(config.optimizer, args.n_experts, tp),
    }


def start_progress(config: Config, args: ModelArgs, corpus: PreparedCorpus, *, block_tokens: int, tp: int) -> Progress:
    """Where a new run stands before its first step, with what must be the same to resume it.

    Args:
        args: with the vocabulary set.
        block_tokens: tokens that stay together in the data order.
        tp: tensor-parallel degree of the first stage.
    """
    by_source = {name: source.fingerprint[:12] for name, source in corpus.sources.items()}
    identity = {**identity_of(config, args, tp), "data by source": by_source, "data": corpus.fingerprint}
    return Progress(identity=identity, block_tokens=block_tokens, data_order={"order": config.data.order})


def resume(
    saved: Saved | None, fresh: Progress, stages: Stages, model: ParallelModel, checkpoints: CheckpointManager
) -> Progress:
    """Load a checkpoint, or without one the weights that the config wants to start from. Collective.

    Args:
        fresh: the progress of a new run, from `start_progress`.

    Returns:
        the progress to train on from.

    Raises:
        ConfigError: the checkpoint is of another model or other data.
    """
    warn = logger.warning if model.world.rank == 0 else logger.debug
    for line in shortened_warmups(model.config, stages):
        warn(line)
    if saved is None:
        if model.config.model.checkpoint:
            _start_from_run(model, stages)
        elif starts_from_weights(model.config):
            _start_from_hub(model, stages)
        if model.config.model.adapter:
            load_initial_adapter(model)
        if model.world.rank == 0:
            log_rope_notes(model.config, stages, model.args)
        return fresh
    path, saved_progress = saved
    settings_file = path.parents[1] / RUN_CONFIG
    why = partial(_describe_data_changes, settings_file, model.config)
    check_identity(saved_progress.identity, fresh.identity, path, data_changes=why)
    if changed := _changes(_data_order(saved_progress), _data_order(fresh)):
        warn("%s: the data order changes from here, and some text may be read twice", ", ".join(changed))
    if model.config.lora and starts_from_weights(model.config):
        load_base(model)
    checkpoints.load(path, model.parts, model.optimizers)
    progress = saved_progress.under_config_of(fresh)
    logger.info("resumed from %s: %d of %d steps are done", path, progress.step, count_steps(progress, stages))
    if model.world.rank == 0:
        _log_changed_settings(settings_file, model.config)
    stage = stages[progress.stage]
    number = f"stage {stage.index + 1}"
    if progress.stage_step > stage.steps:
        warn(f"{number} has taken {progress.stage_step} steps and the config gives it {stage.steps}: it ends here")
    if progress.stage_step and not is_stage_trained(progress, stages):
        rope, new_rope = progress.ropes.get(str(stage.index), stage.rope_settings), stage.rope_settings
        if rope != new_rope:
            changed = [f"{rope or MODEL_ROPE} -> {new_rope or MODEL_ROPE}"]
            if rope and new_rope:
                changed = _changes(rope, new_rope)
            warn(f"{number} goes on with another rope: {', '.join(changed)}")
        was = progress.text_settings
        if CONVERSATIONS in stage.text_settings:
            was = {CONVERSATIONS: CUT} | was
        if changed := _changes(was, stage.text_settings):
            changes = ", ".join(changed)
            warn(f"{number} reads its text differently from here on, and may skip some or read some twice: {changes}")
    if model.world.rank == 0:
        log_rope_notes(model.config, stages, model.args, progress.stage)
    return progress


def _start_from_hub(model: ParallelModel, stages: Stages) -> None:
    """Load the weights of model.hub_checkpoint, and log which stages use another rotary embedding than they did."""
    settings = model.config.model
    check_hub_tokenizer(model.config)
    load_base(model)
    config = registry.start_config(settings, model.args)
    for number, stage in enumerate(stages, 1):
        if stage.rope and (changed := rope_changes(config, stage.rope, model.args.rotary_dim)):
            logger.info("stage %d changes the rotary embedding they were trained with: %s", number, ", ".join(changed))


def _start_from_run(model: ParallelModel, stages: Stages) -> None:
    """Load the weights of model.checkpoint, and log which stages use another rotary embedding. Collective.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    saved = open_saved_model(Path(os.path.expanduser(model.config.model.checkpoint)), collective=True)
    load_weights(saved, model.parts)
    logger.info("weights of step %d from %s", saved.progress.step, saved.path)
    rope = saved.stage.rope
    was = dataclasses.asdict(rope) if rope else None
    for number, stage in enumerate(stages, 1):
        now = dataclasses.asdict(stage.rope) if stage.rope else None
        if was != now:
            changed = _changes(was, now) if was and now else [f"{was or MODEL_ROPE} -> {now or MODEL_ROPE}"]
            logger.info("stage %d changes the rotary embedding they were trained with: %s", number, ", ".join(changed))


def _log_changed_settings(file: Path, config: Config) -> None:
    """Log which settings differ from those of the run's last start, which are in this file."""
    try:
        changed = _changed_settings(file, config)
    except ConfigError as error:
        return logger.info("the settings of the last start are unknown: %s", error.message)
    if changed:
        logger.info("resumed with other settings: %s", "; ".join(changed))


def _changed_settings(file: Path, config: Config) -> list[str]:
    """The settings that differ from those in a file, as `name old -> new`.

    Raises:
        ConfigError: the file is gone, or another version of this program wrote it.
    """
    was, now = (flatten(dataclasses.asdict(settings)) for settings in (load_config(file), config))
    # Keys of a table that only one of the two has, such as a stage or a rope, are left out.
    return _changes({name: was[name] for name in was if name in now and name != "job.dump_folder"}, now)


def _describe_data_changes(file: Path, config: Config) -> str:
    """Which settings of the text differ from those in a file; if none does, that the text has changed."""
    try:
        changed = [line for line in _changed_settings(file, config) if line.startswith(("data.", "tokenizer."))]
    except ConfigError as error:
        return f"the settings of the last start are unknown ({error.message})"
    same = "the settings are those of the last start, so the text or the tokenizer's file has changed"
    return "; ".join(changed) or same


def _data_order(progress: Progress) -> JsonObject:
    """What decides the data order, by the names that a message uses."""
    return {"tokens of the longest stage": progress.block_tokens, "data.order": progress.data_order.get("order")}


def _changes(was: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """The entries of `was` that have another value now, as `name old -> new`."""
    return [f"{name} {value} -> {now.get(name)}" for name, value in was.items() if now.get(name) != value]
