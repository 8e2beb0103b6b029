"""Decides whether a config may run on a number of ranks. Check, plan, dry run, parity and the trainer all ask here.

The launcher waits for this check, so the module imports nothing that only training needs.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from torchtitan_cp.attention import make_plan
from torchtitan_cp.attention.kernels import KERNELS, Case
from torchtitan_cp.checkpoint.hub import WEIGHT_FILES, check_weights
from torchtitan_cp.checkpoint.hub_rope import fill_rope, hub_rope
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.check import CHECKPOINTS, check_config, check_dump_folder, check_stages
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.config.degrees import Degrees, resolve_degrees
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.sections import Data, Rope, SourceKeys, Stage, Tokenizer
from torchtitan_cp.curriculum import ResolvedStage, check_head_dim, resolve_stages
from torchtitan_cp.data.corpus.chat import find_chat_template
from torchtitan_cp.data.corpus.documents import check_corpus
from torchtitan_cp.data.corpus.tokenizer import load_tokenizer, other_pieces, vocabulary_size
from torchtitan_cp.data.corpus.tokenizer_files import find_tokenizers
from torchtitan_cp.metrics.throughput import layer_costs
from torchtitan_cp.optim.optimizers import OPTIMIZERS
from torchtitan_cp.optim.rules import check_rules
from torchtitan_cp.parallel.checks import check_expert_parallel, check_tensor_parallel
from torchtitan_cp.parallel.float8 import check_float8
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
    model_args: ModelArgs

    @property
    def longest(self) -> int:
        """Sequence length of the longest stage, in tokens."""
        return max(stage.seq_len for stage in self.stages)

    def config_of(self, stage: ResolvedStage) -> Config:
        """The config with the tp, pp and activation memory of a stage."""
        return replace(self.config, activation=stage.activation).with_keys(parallel={"tp": stage.tp, "pp": stage.pp})


def resolve_run(config: Config, ranks: int, model_args: ModelArgs | None = None) -> ResolvedRun:
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


def fit_vocabulary(run: ResolvedRun, size: int) -> ModelArgs:
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
            fix="use the checkpoint's own tokenizer, whose special_tokens_map.json and tokenizer_config.json name no "
            "token that its vocabulary lacks, or set model.load_weights = false for fresh weights"
            if run.config.model.hub_checkpoint and run.config.model.load_weights
            else "set model.overrides = {vocab_size = 0} to take the tokenizer's, or use another tokenizer",
        )
    return args if args.vocab_size else replace(args, vocab_size=size)


def with_defaults(config: Config) -> Config:
    """The config with the defaults that depend on other keys: tokenizer, flavor, each stage's RoPE, and max_document.

    Where [tokenizer] names none, it is that of model.hub_checkpoint, if there is one: tokenizer.json, else
    tokenizer.model. Each RoPE key is taken as written, else from config.json, else it has its default. With an
    architecture that takes any config.json, a stage without `rope` keeps the model's own RoPE. Conversations are
    limited to the longest stage.
    """
    model, stages = config.model, config.curriculum.stages
    config = replace(config, data=_with_limits(config.data, stages), tokenizer=_with_hub_tokenizer(config))
    takes_any, has_hub = registry.architecture(model).args_of, registry.has_hub_config(model)
    if has_hub and any(stage.rope for stage in stages):
        hub = registry.sizes_of(registry.model_args_of(model))["config"] if takes_any else registry.hub_config(model)
        stages = tuple(replace(stage, rope=stage.rope and fill_rope(stage.rope, hub)) for stage in stages)
    if not takes_any and not all(stage.rope for stage in stages):
        rope = hub_rope(registry.hub_config(model)) if has_hub else Rope()
        stages = tuple(replace(stage, rope=stage.rope or rope) for stage in stages)
    flavor = model.flavor or ("" if takes_any or has_hub else registry.DEFAULT_FLAVOR)
    return config.with_keys(model={"flavor": flavor}, curriculum={"stages": stages})


def _with_hub_tokenizer(config: Config) -> Tokenizer:
    """The checkpoint's own tokenizer, if [tokenizer] names no other and asks for none of another size."""
    settings, start = config.tokenizer, registry.start_folder(config.model)
    if start is None or settings != Tokenizer(bos=settings.bos):
        return settings
    found = [replace(settings, kind=kind, path=str(file)) for kind, file in find_tokenizers(start).items()]
    return (found or [settings])[0]


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


def without_lossy_options(config: Config) -> Config:
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
    return without_lossy_options(config).with_keys(
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


def check_before_corpus(run: ResolvedRun, device: str, *, trains: bool = True, download: bool = False) -> ModelArgs:
    """Check what building and filling the model would refuse, before the corpus is prepared, which may take hours.

    Args:
        device: type of device that the ranks compute on, as in torch.device.
        trains: training is to start; comparisons and evaluations take other weights, and write no metrics.
        download: see `check_hub_weights`.

    Returns:
        ModelArgs, with an embedding for every token id.

    Raises:
        UserError: the first problem found.
    """
    config = run.config
    if trains:
        check_hub_tokenizer(config)
    args = fit_vocabulary(run, vocabulary_size(config.tokenizer))
    check_kernel(config, args, device)
    if config.training.float8 != "none":
        check_float8(config.training.float8, device)
    if config.optimizer.state == "8bit":
        import_extra("torchao.optim", extra="float8", needed_by="optimizer.state = '8bit'")
    if config.optimizer.groups:
        model = registry.empty_model(config.model, args)
        check_rules(config.optimizer.groups, [name for name, _ in model.named_parameters()])
    if trains:
        if config.metrics.wandb:
            import_extra("wandb", extra="wandb", needed_by="metrics.wandb")
        if has_checkpoints(config) and not config.checkpoint.enable:
            raise ConfigError(
                f"{config.job.dump_folder} holds checkpoints, and checkpoint.enable = false would begin anew and drop "
                "the records of their run",
                fix="enable checkpoints, or give the new run a folder of its own: --job.dump_folder=...",
            )
        check_hub_weights(config, args, download=download)
    return args


def has_checkpoints(config: Config) -> bool:
    """Whether the run's folder holds a checkpoint, so that training resumes; its files are not verified."""
    return any(Path(config.job.dump_folder, CHECKPOINTS).glob("step-*[0-9]"))  # not step-N.partial


def check_kernel(config: Config, args: ModelArgs, device: str) -> None:
    """Refuse a context_parallel.kernel that cannot run the model's attention.

    Args:
        args: ModelArgs; device: see `check_before_corpus`.

    Raises:
        ConfigError: naming what the kernel lacks, and the kernels that can.
    """
    name, dtype = config.context_parallel.kernel, getattr(torch, config.training.compute_dtype)
    cases = [
        Case(device, dtype, *sizes, deterministic=config.training.deterministic)
        for sizes in sorted({(mixer.qk_dim, mixer.v_dim, mixer.softcap) for mixer in args.mixers if mixer.n_heads})
    ]
    refusals = {other: next(filter(None, map(kernel.refusal, cases)), "") for other, kernel in KERNELS.items()}
    if refusals.get(name):
        able = [other for other, refusal in refusals.items() if not refusal]
        raise ConfigError(
            f"context_parallel.kernel = {name!r} cannot run this model's attention here: {refusals[name]}",
            fix=f"set it to 'auto', or to {' or '.join(map(repr, able))}",
        )


def check_hub_weights(config: Config, args: ModelArgs, *, download: bool = False) -> None:
    """Check that the weights of model.hub_checkpoint are whole and fit these args, unless the run resumes.

    Args:
        download: those of a name on the hub are downloaded first; otherwise only its list of files is looked at.

    Raises:
        ConfigError: there are none, they are damaged, or of another model.
    """
    model = config.model
    if not _begins_with_hub_weights(config):
        return
    if registry.is_on_hub(model) and not download:
        registry.check_files_on_hub(model)
    else:
        folder = registry.hub_folder(model, WEIGHT_FILES)
        check_weights(folder, registry.empty_model(model, args), registry.hub_of(model))


def _begins_with_hub_weights(config: Config) -> bool:
    """Whether the run loads model.hub_checkpoint: it does not resume."""
    return bool(config.model.hub_checkpoint and config.model.load_weights) and not has_checkpoints(config)


def check_hub_tokenizer(config: Config) -> None:
    """Refuse weights of model.hub_checkpoint under a tokenizer whose ids mean other text, unless the run resumes.

    Added and special tokens may differ, as those of a base model and its chat model do. A checkpoint without
    tokenizer.json and tokenizer.model goes with any tokenizer but one that the corpus is yet to make.

    Args:
        config: as `with_defaults` returns it.

    Raises:
        UserError: naming the tokenizer, and the first id that differs.
    """
    if not _begins_with_hub_weights(config):
        return
    settings, name = config.tokenizer, config.model.hub_checkpoint
    start = registry.start_folder(config.model)
    files = find_tokenizers(start) if start else {}
    if settings.trained:
        raise ConfigError(
            f"the embeddings of model.hub_checkpoint = {name!r} are of its own tokenizer, and [tokenizer] asks for one "
            "that is trained on the corpus",
            fix=f"leave out tokenizer.vocab_size = {settings.vocab_size}, or set model.load_weights = false"
            if files
            else "set tokenizer.kind and tokenizer.path to the tokenizer of the checkpoint, which has none in its "
            "folder, or set model.load_weights = false",
        )
    path = Path(os.path.expanduser(settings.path))
    if not files or (settings.path and any(_same_file(path, file) for file in files.values())):
        return
    kind = settings.kind if settings.kind in files else next(iter(files))
    theirs = load_tokenizer(Tokenizer(kind=kind, path=str(files[kind])))
    if others := other_pieces(load_tokenizer(settings), theirs):
        own = repr(settings.path) if settings.path else settings.kind
        raise ConfigError(
            f"the tokenizer {own} is not that of model.hub_checkpoint, {files[kind]}: {len(others)} ids mean other "
            f"text, the first of them {others[0]}",
            fix="leave out tokenizer.kind and tokenizer.path to take the checkpoint's, or set model.load_weights = "
            "false; to keep its weights under this tokenizer, give a copy of its folder without the tokenizer's files",
        )


def _same_file(path: Path, other: Path) -> bool:
    """Whether two files have the same content."""
    return path.is_file() and path.read_bytes() == other.read_bytes()
