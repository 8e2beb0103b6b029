"""Decides whether a config may run on a number of ranks. Check, plan, dry run, parity and the trainer all ask here.

The launcher waits for this check, so the module imports nothing that only training needs.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_cp.attention import make_plan
from torchtitan_cp.checkpoint.hub import files_by_tensor, fill_rope, hub_rope, load_parts
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.check import CHECKPOINTS, check_config, check_dump_folder, check_stages
from torchtitan_cp.config.contract import PlannedArgs
from torchtitan_cp.config.degrees import Degrees, resolve_degrees
from torchtitan_cp.config.sections import Data, Rope, SourceKeys, Stage
from torchtitan_cp.curriculum import ResolvedStage, check_head_dim, resolve_stages
from torchtitan_cp.data.corpus.chat import find_chat_template
from torchtitan_cp.data.corpus.documents import check_corpus
from torchtitan_cp.metrics.throughput import layer_costs
from torchtitan_cp.optim.optimizers import OPTIMIZERS
from torchtitan_cp.parallel.checks import check_expert_parallel, check_tensor_parallel
from torchtitan_cp.parallel.pipeline_stages import plan_pipeline
from torchtitan_cp.training import registry


@dataclass(frozen=True)
class ResolvedRun:
    """A config that may run on this number of ranks, and what follows from that number.

    Attributes:
        stages: of the curriculum.
        degrees: of the mesh, for each stage.
        model_args: sizes of the model; vocab_size is 0 where the tokenizer decides it.
    """

    config: Config
    ranks: int
    stages: tuple[ResolvedStage, ...]
    degrees: tuple[Degrees, ...]
    model_args: PlannedArgs

    @property
    def longest(self) -> int:
        """Sequence length of the longest stage, in tokens."""
        return max(stage.seq_len for stage in self.stages)

    def config_of(self, stage: ResolvedStage) -> Config:
        """The config with the tp, pp and activation memory of a stage."""
        return replace(self.config, activation=stage.activation).with_keys(parallel={"tp": stage.tp, "pp": stage.pp})


def resolve_run(config: Config, ranks: int, model_args: PlannedArgs | None = None) -> ResolvedRun:
    """Resolve a config for a number of ranks, or refuse it. Every rule is reached from here:

    - `config.check.check_config`: rules between keys. The product of the degrees (`config.degrees.resolve_degrees`),
      lengths and batches that the ranks can share, micro-batches for the pipeline schedule, RoPE, data, gates.
    - `registry.model_args_of`: flavor, overrides and hub checkpoint. `curriculum.check_head_dim`: RoPE on these heads.
    - `registry.check_model`: degrees and flags that the architecture lacks, what this model cannot do, and the biases
      that training.router_bias_update changes.
    - `registry.config_for_hub`: whether Hugging Face's format can describe a model that each stage is to export.
    - `parallel.checks.check_tensor_parallel`: tp divides heads and MLP; `check_expert_parallel`: ep divides experts.
    - `parallel.pipeline_stages.plan_pipeline`: there are enough layers for pp and the schedule, which this torch has.
    - `optim.optimizers`: what an optimizer excludes.
    - `attention.make_plan`: strategy, kernel and layout at this length and context-parallel degree.

    For example, pp = 3 is allowed if the degrees multiply to `ranks`; the architecture supports pipelines
    (`check_model`); there are enough layers (`plan_pipeline`); the schedule works with the step's micro-batches, the
    recomputation of blocks and compile; and checkpoints are on if another stage has another pp (`_check_stage` and
    `_check_stage_sections` of `config/check.py`).

    Args:
        model_args: sizes of the model, e.g. with the tokenizer's vocabulary; None: those that the config gives.

    Raises:
        UserError, ContextParallelError: the first rule that is broken, with its fix.
    """
    config = with_defaults(config)
    check_config(config, ranks)
    model_args = model_args or registry.model_args_of(config.model)
    stages = resolve_stages(config, ranks)
    registry.check_model(config, stages, model_args)
    check_head_dim(stages, model_args.rotary_dim)
    for stage in stages if config.checkpoint.export != "no" else ():
        registry.config_for_hub(config.model, model_args, stage.seq_len, stage.rope)
    costs = layer_costs(model_args, max(stage.seq_len for stage in stages))
    for stage in stages:
        check_tensor_parallel(model_args, stage.tp)
        check_expert_parallel(model_args, config.parallel)
        plan_pipeline(config.parallel, stage.pp, costs)
        make_plan(
            stage.seq_len,
            ranks=stage.cp,
            strategy=stage.strategy,
            kernel=config.context_parallel.kernel,
            layout=config.context_parallel.layout,
            all_to_all_ranks=stage.all_to_all_ranks,
            kv_transfer=config.context_parallel.kv_transfer,
        )
    degrees = tuple(resolve_degrees(config.parallel, ranks, stage) for stage in config.curriculum.stages)
    OPTIMIZERS[config.optimizer.name].check(config, {degree.tp for degree in degrees})
    return ResolvedRun(config, ranks, stages, degrees, model_args)


def fit_vocabulary(run: ResolvedRun, size: int) -> PlannedArgs:
    """The model's sizes, with an embedding for every token id.

    Args:
        size: number of token ids of the tokenizer.

    Raises:
        ConfigError: the model has fewer embeddings.
    """
    args = run.model_args
    if 0 < args.vocab_size < size:
        raise ConfigError(
            f"the model has {args.vocab_size} embeddings and the tokenizer {size} pieces",
            fix="use the checkpoint's own tokenizer, or set model.load_weights = false for fresh weights"
            if run.config.model.hub_checkpoint and run.config.model.load_weights
            else "set model.overrides = {vocab_size = 0} to take the tokenizer's, or use another tokenizer",
        )
    return args if args.vocab_size else replace(args, vocab_size=size)


def with_defaults(config: Config) -> Config:
    """The config with the defaults that depend on other keys: flavor, each stage's RoPE, and max_document.

    Each RoPE key is taken as written, else from config.json, else it has its default. With an architecture that takes
    any config.json, a stage without `rope` keeps the model's own RoPE. Conversations are limited to the longest stage.
    """
    model, stages = config.model, config.curriculum.stages
    config = replace(config, data=_with_limits(config.data, stages))
    takes_any, has_hub = registry.architecture(model).args_of, registry.has_hub_config(model)
    if has_hub and any(stage.rope for stage in stages):
        hub = registry.sizes_of(registry.model_args_of(model))["config"] if takes_any else registry.hub_config(model)
        stages = tuple(replace(stage, rope=stage.rope and fill_rope(stage.rope, hub)) for stage in stages)
    if not takes_any and not all(stage.rope for stage in stages):
        rope = hub_rope(registry.hub_config(model)) if has_hub else Rope()
        stages = tuple(replace(stage, rope=stage.rope or rope) for stage in stages)
    flavor = model.flavor or ("" if takes_any or has_hub else registry.DEFAULT_FLAVOR)
    return config.with_keys(model={"flavor": flavor}, curriculum={"stages": stages})


def _with_limits(data: Data, stages: tuple[Stage, ...]) -> Data:
    """Limit conversations to the longest stage where [data] sets no limit."""
    longest = max((stage.seq_len for stage in stages), default=0)

    def limit(source: SourceKeys) -> int:
        if source.conversations and not source.max_document and 0 < longest < source.min_document:
            raise ConfigError(
                f"{source.where}.min_document = {source.min_document} is more than the longest stage, {longest} tokens,"
                " to which conversations are limited",
                fix="lower min_document, or lengthen a stage",
            )
        return source.max_document or longest * source.conversations

    sources = tuple(replace(source, max_document=limit(source)) for source in data.sources)
    return replace(data, max_document=limit(data), sources=sources)


def exact_config(config: Config) -> Config:
    """The config without features that round or drop numbers on purpose, so that ranks equal one process."""
    return config.with_keys(
        training={"float8": "none", "reduce_dtype": "float32"},
        context_parallel={"kv_transfer": "exact"},
    )


def doctor_config(config: Config, ranks: int) -> Config:
    """The config as the doctor runs it: the last stage, all ranks on each sequence, in fp32, nothing compiled."""
    check_stages(config)
    last = config.curriculum.stages[-1]
    stage = replace(last, cp=None, tp=None, pp=None, lr=None, until={}, tokens=0, steps=1)
    ep = math.gcd(config.parallel.ep, ranks)
    ones = dict.fromkeys(("pp", "tp", "dp_replicate", "dp_shard"), 1)
    return exact_config(config).with_keys(
        curriculum={"stages": (stage,)},
        parallel={**ones, "cp": ranks, "ep": ep, "async_tp": False},
        training={"compute_dtype": "float32", "micro_batch_sequences": 1},
        context_parallel={"kernel": "auto"},
        compile={"enable": False},
        checkpoint={"enable": False, "export": "no"},
        lr_scheduler={"warmup_steps": 0},  # the rules for these keys are about the whole run
        evaluation={"position_seq_len": 0, "passkey": replace(config.evaluation.passkey, lengths=())},
    )


def check_files(config: Config) -> None:
    """Check what a run reads and writes on this machine: corpus, chat template and the run's folder.

    Raises:
        UserError: one of them cannot be used.
    """
    check_corpus(config.data)
    for source in config.data.by_name().values():
        if source.conversations:
            find_chat_template(source, config.tokenizer, registry.start_folder(config.model))
    check_dump_folder(config.job.dump_folder)


def check_hub_weights(config: Config, args: PlannedArgs) -> None:
    """Check that model.hub_checkpoint has weights, unless the run resumes. With `hub.load`, they must fit these args.

    Raises:
        ConfigError: it has none, or those of another model.
    """
    folder = Path(os.path.expanduser(config.model.hub_checkpoint))
    resumes = any(Path(config.job.dump_folder, CHECKPOINTS).glob("step-*"))
    if config.model.hub_checkpoint and config.model.load_weights and folder.is_dir() and not resumes:
        files_by_tensor(folder)
        hub = registry.architecture(config.model).hub
        if hub and hub.load:
            load_parts(folder, [registry.empty_model(config.model, args)], (), hub, lambda *_, **__: True)
