"""Rules that involve several keys. The bounds of one key are in `key`."""

import math
import re
from collections.abc import Sequence

from torchtitan_cp.config.data import check_sources, check_stage_data
from torchtitan_cp.config.degrees import length_unit
from torchtitan_cp.config.errors import ConfigError
from torchtitan_cp.config.key import check_read_keys
from torchtitan_cp.config.names import MEASURED, SCHEDULES
from torchtitan_cp.config.rope import check_rope
from torchtitan_cp.config.run import Passkey
from torchtitan_cp.config.sections import Config, Stage
from torchtitan_cp.config.stages import ResolvedStage
from torchtitan_cp.config.training import LRScheduler

MAX_TOKENS = 1e15  # of a stage
FLOAT8_ROWS = 16  # of a product in float8

Stages = Sequence[ResolvedStage]


def check_stages(config: Config) -> None:
    """Refuse a config without a stage."""
    if not config.curriculum.stages:
        raise ConfigError("there is no stage to train", fix="add a [[curriculum.stages]] table with seq_len and steps")


def check_stage_keys(stage: Stage, where: str) -> None:
    """Refuse a stage as written that cannot be resolved: it lacks a key, or does not say when it ends.

    Args:
        where: the dotted key of the stage.
    """
    missing = [name for name in ("seq_len", "global_batch_tokens") if not getattr(stage, name)]
    if missing:
        raise ConfigError(f"{where} has no {missing[0]}", fix=f"add {missing[0]} = ... to the stage")
    ends = [name for name in ("steps", "tokens", "until") if getattr(stage, name)]
    if len(ends) != 1:
        has = " and ".join(ends) if ends else "none of steps, tokens and until"
        raise ConfigError(f"{where} has {has}", fix="give one of them")
    if max(stage.steps * stage.global_batch_tokens, stage.tokens, stage.until.get("max_tokens", 0)) > MAX_TOKENS:
        raise ConfigError(f"{where}.{ends[0]} asks for more than {MAX_TOKENS:.0e} tokens", fix="make it shorter")
    unknown = [name for name in stage.until if name not in (*MEASURED, "max_tokens")]
    if unknown:
        raise ConfigError(
            f"{where}.until names {', '.join(unknown)}, which no evaluation measures",
            fix=f"use {', '.join(MEASURED)}",
        )
    if stage.until and (not stage.until.get("max_tokens", 0) > 0 or len(stage.until) == 1):
        raise ConfigError(
            f"{where}.until = {stage.until} needs max_tokens, which ends the stage in any case, and a condition",
            fix=f"e.g. {where}.until = {{validation_loss = 2.5, max_tokens = 1_000_000_000}}",
        )


def check_config(config: Config, stages: Stages, ranks: int) -> None:
    """Check a config for a number of ranks, before one starts.

    Args:
        stages: of the config, as `curriculum.resolve_stages` returns them for these ranks.

    Raises:
        ConfigError: the first rule that is broken, with its fix.
    """
    _check_groups(config)
    _check_lora(config)
    _check_passkey(config.evaluation.passkey)
    check_read_keys(config.tokenizer, "kind", "tokenizer")
    check_sources(config.data, has_tokenizer=not config.tokenizer.trained)
    _check_sections(config, stages, ranks)
    for stage in stages:
        _check_stage_sections(config, stage, stages[0])
        _check_stage(config, stage, stages[0])


def shortened_warmups(config: Config, stages: Stages) -> list[str]:
    """A line for each warm-up that is longer than its schedule, as in a short trial of a long run.

    Stages that end by `until` have no fixed number of steps.
    """
    lines = []
    shared = [stage for stage in stages if stage.lr is None]
    spans: list[tuple[str, LRScheduler, list[ResolvedStage]]] = [("lr_scheduler", config.lr_scheduler, shared)]
    spans += [(f"{stage.where}.lr", stage.lr, [stage]) for stage in stages if stage.lr]
    for where, schedule, span in spans:
        steps = sum(stage.steps for stage in span)
        if span and schedule.warmup_steps > steps and not any(stage.until for stage in span):
            exceeds = f"{where}.warmup_steps = {schedule.warmup_steps} exceeds the {steps} steps of this schedule"
            lines.append(f"{exceeds}: the warm-up is shortened to {steps}")
    return lines


def _check_sections(config: Config, stages: Stages, ranks: int) -> None:
    """Rules between the sections of the whole run."""
    if config.checkpoint.export != "no" and not config.checkpoint.enable:
        raise ConfigError(
            "checkpoint.export needs checkpoints, and checkpoint.enable = false",
            fix='enable checkpoints, or set checkpoint.export = "no"',
        )
    if config.parallel.async_tp and not (config.compile.enable and max(stage.tp for stage in stages) > 1):
        raise ConfigError(
            "parallel.async_tp needs the compiler and tensor-parallel ranks",
            fix="set compile.enable = true and parallel.tp above 1, or leave it out",
        )
    for key, folder in (("job.dump_folder", config.job.dump_folder), ("data.cache_folder", config.data.cache_folder)):
        if not folder:
            raise ConfigError(f"{key} is empty", fix=f"name a folder, e.g. --{key}=outputs/mine")
    traced = max((0, *config.profiling.ranks)) if config.profiling.steps else 0
    if traced >= ranks:
        raise ConfigError(f"profiling.ranks = {traced} does not exist on {ranks} ranks", fix=f"use 0 to {ranks - 1}")
    if config.health.on_spike == "handle" and not config.health.spike_threshold:
        raise ConfigError(
            "health.on_spike = 'handle' has no effect with health.spike_threshold = 0",
            fix="set spike_threshold above 0, or leave on_spike out",
        )


def _check_stage_sections(config: Config, stage: ResolvedStage, first: ResolvedStage) -> None:
    """Rules between the sections of the whole run and what a stage may set for itself."""
    schedule, recomputed = config.parallel.pp_schedule, stage.activation.checkpoint
    if (stage.tp, stage.pp) != (first.tp, first.pp) and not config.checkpoint.enable:
        raise ConfigError(
            f"{stage.where} changes tp or pp, which needs a checkpoint, and checkpoint.enable = false",
            fix="enable checkpoints, or keep one tp and pp",
        )
    if config.compile.enable:
        check_compiled_pipeline(config, stage)
    if stage.pp > 1 and SCHEDULES[schedule].splits_backward and recomputed not in ("none", "full"):
        # Each half of the backward recomputes the block, which torch's selective recomputation allows only once.
        raise ConfigError(
            f"{_splitting(schedule)} activation.checkpoint = {recomputed!r} in {stage.where} does not allow",
            fix=f"use {_unsplit_schedules()}, or activation.checkpoint = 'full' or 'none'",
        )
    if config.training.float8 != "none" and stage.tp > 1:
        raise ConfigError(
            "training.float8 does not work with parallel.tp above 1: torchao's layers take whole weights",
            fix="use dp_shard or cp for these ranks, or float8 = 'none'",
        )
    if config.lora and config.lora.base == "nf4" and stage.tp > 1:
        raise ConfigError(
            "lora.base = 'nf4' does not work with parallel.tp above 1: its groups of 16,384 weights cross the shards",
            fix="use dp_shard or cp for these ranks, or base = 'bfloat16'",
        )


def check_compiled_pipeline(config: Config, stage: ResolvedStage) -> None:
    """Refuse compiled blocks under a pipeline schedule that splits their backward."""
    schedule = config.parallel.pp_schedule
    if stage.pp > 1 and SCHEDULES[schedule].splits_backward:
        raise ConfigError(
            f"{_splitting(schedule)} a compiled block cannot",
            fix=f"use {_unsplit_schedules()}, or compile.enable = false",
        )


def _splitting(schedule: str) -> str:
    return f"parallel.pp_schedule = {schedule!r} splits the backward of a block, which"


def _unsplit_schedules() -> str:
    return ", ".join(name for name, known in SCHEDULES.items() if not known.splits_backward)


def _check_groups(config: Config) -> None:
    for index, rule in enumerate(config.optimizer.groups):
        if problem := _pattern_problem(rule.match):
            where = f"optimizer.groups[{index}]"
            text = f"{where}.match {problem}" if rule.match else f"{where} has no match"
            raise ConfigError(text, fix="write e.g. match = 'tok_embeddings|output'")


def _check_lora(config: Config) -> None:
    """Rules between [lora] and other sections; which modules it names is checked with the model."""
    lora = config.lora
    if lora is None and config.model.adapter:
        raise ConfigError(
            f"model.adapter = {config.model.adapter!r} is trained on by [lora], which this file lacks",
            fix="add [lora] with its rank and alpha; to train all weights, merge it into the model first",
        )
    if lora is None:
        return
    if config.model.checkpoint:
        raise ConfigError(
            f"model.checkpoint = {config.model.checkpoint!r} and [lora] exclude each other: adapters are of a model in "
            "Hugging Face's format, by whose digest a resume knows it",
            fix="export that run (torchtitan-cp export), and set model.hub_checkpoint to the folder it makes",
        )
    for name in ("targets", "train"):
        for index, pattern in enumerate(getattr(lora, name)):
            if problem := _pattern_problem(pattern):
                raise ConfigError(f"lora.{name}[{index}] {problem}", fix="write e.g. targets = ['attention', 'w2$']")
    if lora.dropout:
        raise ConfigError(
            f"lora.dropout = {lora.dropout} is not supported: a recomputed block, and each rank that holds a part of a "
            "sequence, would have to draw the same numbers again",
            fix="leave it out; text that is read once needs none",
        )
    if config.training.float8 != "none":
        raise ConfigError(
            f"training.float8 = {config.training.float8!r} and [lora] exclude each other: torchao's layers have no "
            "adapters",
            fix="leave one of them out",
        )
    if config.optimizer.name == "muon":
        raise ConfigError(
            "optimizer.name = 'muon' orthogonalises steps of whole matrices, and an adapter is a product of two",
            fix="use adamw with [lora]",
        )


def _pattern_problem(pattern: str) -> str:
    """Why a regular expression cannot be used; empty if it can."""
    try:
        re.compile(pattern)
    except re.error as error:
        return f"= {pattern!r} is not a valid regular expression: {error}"
    return "" if pattern else "is empty"


def _check_passkey(settings: Passkey) -> None:
    for name, text in (("needle", settings.needle), ("question", settings.question)):
        where = f"evaluation.passkey.{name} = {text!r}"
        try:
            whole = text.format(name="AB", key="12", word="xy")
            keyless, nameless = text.format(name="AB", key="", word=""), text.format(name="", key="12", word="xy")
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{where} cannot be filled in: {error}", fix="use only {name}, and {key} or {word}"
            ) from None
        if whole in (keyless, nameless):
            raise ConfigError(f"{where} lacks the name or the key", fix="write {name}, and {key} or {word}, into it")
        if name == "question" and not whole.startswith(keyless):
            raise ConfigError(f"{where} does not end with the key", fix="end it with {key} or {word}")


def _check_stage(config: Config, stage: ResolvedStage, first: ResolvedStage) -> None:
    where, cp, tp = stage.where, stage.cp, stage.tp
    if stage.until:
        _check_until(config, stage, first)
    check_measured_lengths(config, stage, where, cp, tp)
    unit = length_unit(cp, tp)
    if stage.seq_len % unit:
        lower = stage.seq_len // unit * unit
        raise ConfigError(
            f"{where}.seq_len = {stage.seq_len} cannot be shared by cp = {cp} and tp = {tp}: it is not divisible by "
            f"{unit}",
            fix=f"use {f'{lower} or ' if lower else ''}{lower + unit}, or another cp or tp",
        )
    _check_float8_rows(config, stage)
    if stage.rope:
        check_rope(stage.rope, stage.seq_len, f"{where}.rope")
    check_stage_data(config.data, stage.data, stage.seq_len, f"{where}.data")
    if stage.data.growth_steps > stage.steps:
        raise ConfigError(
            f"{where}.data.growth_steps = {stage.data.growth_steps} exceeds the stage's {stage.steps} steps, so "
            f"attention would never see {stage.seq_len} tokens",
            fix=f"use at most {stage.steps}",
        )
    unit = stage.round_tokens
    if stage.global_batch_tokens % unit:
        raise ConfigError(
            f"{where}.global_batch_tokens = {stage.global_batch_tokens} is not a multiple of "
            f"seq_len {stage.seq_len} x {unit // stage.seq_len} sequences run at once "
            "(data-parallel ranks x micro-batch)",
            fix=f"use {-(-stage.global_batch_tokens // unit) * unit}, or a larger cp",
        )
    if stage.pp > 1:
        _check_micro_batches(stage, config.parallel.pp_schedule)


def _check_float8_rows(config: Config, stage: ResolvedStage) -> None:
    """The gradient of a weight sums over a rank's tokens, and a product in float8 over multiples of 16."""
    tiles, tokens = stage.activation.mlp_tiles, stage.seq_len // stage.cp
    rows = stage.micro_batch_sequences * math.gcd(tokens, -(-tokens // tiles))
    if config.training.float8 != "none" and rows % FLOAT8_ROWS:
        unit = FLOAT8_ROWS * stage.cp * tiles
        raise ConfigError(
            f"training.float8 multiplies {FLOAT8_ROWS} tokens at a time, and a rank's {tokens} tokens of "
            f"{stage.where} in {tiles} mlp_tiles are not multiples of {FLOAT8_ROWS}",
            fix=f"use seq_len = {-(-stage.seq_len // unit) * unit}, other mlp_tiles, or training.float8 = 'none'",
        )


def check_measured_lengths(config: Config, stage: Stage, where: str, cp: int, tp: int) -> None:
    """Refuse a cp and tp whose ranks cannot share the sequences of an evaluation, which have other lengths."""
    evaluation = config.evaluation
    wanted = {f"evaluation.passkey.lengths has {length} tokens": length for length in evaluation.passkey.lengths}
    wanted[f"evaluation.position_seq_len is {evaluation.position_seq_len} tokens"] = evaluation.position_seq_len
    if "short_loss_rise" in stage.until:
        first = config.curriculum.stages[0].seq_len
        wanted[f"{where}.until measures short_loss_rise at {first} tokens, the first stage's"] = first
    for key, length in wanted.items():
        if length % (unit := length_unit(cp, tp)):
            raise ConfigError(
                f"{key}, which the cp x tp = {cp * tp} ranks of {where} cannot share",
                fix=f"make that length a multiple of {unit}, or leave it out",
            )


def _check_until(config: Config, stage: ResolvedStage, first: ResolvedStage) -> None:
    where = f"{stage.where}.until"
    if config.evaluation.interval == 0:
        raise ConfigError(
            f"{where} is decided after evaluations, and evaluation.interval is 0",
            fix="set evaluation.interval to a number of steps, or leave it out",
        )
    sources = config.data.by_name()
    mixture = stage.data.mixture or dict.fromkeys(sources, 1.0)
    if not any(mixture.get(name) and source.validation_fraction for name, source in sources.items()):
        raise ConfigError(
            f"{where} needs held-out text, but none of the stage's sources holds any out",
            fix="set validation_fraction of a source above 0, or give the stage steps",
        )
    if not 0 <= stage.until.get("passkey_accuracy", 0) <= 1:
        accuracy = stage.until["passkey_accuracy"]
        raise ConfigError(f"{where}.passkey_accuracy = {accuracy} is never reached", fix="use a fraction from 0 to 1")
    if "short_loss_rise" in stage.until and stage is first:
        raise ConfigError(
            f"{where} has short_loss_rise, which compares with the end of the first stage: this one",
            fix="leave it out here",
        )
    passkey = config.evaluation.passkey
    too_long = passkey.lengths and min(passkey.lengths) > stage.seq_len
    if "passkey_accuracy" in stage.until and ("passkey" not in passkey.variants or not passkey.trials or too_long):
        raise ConfigError(
            f"{where} has passkey_accuracy, and [evaluation.passkey] measures none at up to {stage.seq_len} tokens",
            fix="give it the variant 'passkey', trials, and a length up to the stage's",
        )


def _check_micro_batches(stage: ResolvedStage, schedule: str) -> None:
    """Refuse too few micro-batches for the pipeline; interleaved schedules need full rounds."""
    count, pp, unit = stage.micro_batches, stage.pp, stage.round_tokens
    rounds = max(1, count // pp) if schedule.startswith("interleaved") else 1
    if count < pp or count % rounds:
        wanted = max(pp, -(-count // pp) * pp)
        raise ConfigError(
            f"{stage.where}.global_batch_tokens = {stage.global_batch_tokens} makes {count} micro-batches, which "
            f"{schedule} cannot assign to {pp} pipeline ranks",
            fix=f"use {wanted * unit} for {wanted} micro-batches, or fewer pipeline ranks",
        )
