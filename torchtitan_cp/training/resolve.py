"""Decides whether a config may run on a number of ranks. Check, plan, dry run, parity and the trainer all ask here.

What the run needs besides of this machine, its files and devices, is in `preflight`. The launcher waits for this check,
so the module imports nothing that only training needs.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_cp.attention import AttentionMask, choose_strategy, make_plan
from torchtitan_cp.checkpoint.hub_rope import fill_rope, hub_rope
from torchtitan_cp.checkpoint.saved_run import read_saved_run
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.check import check_config, check_stages
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.config.data import Data, SourceKeys
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.sections import Stage, Tokenizer
from torchtitan_cp.curriculum import ResolvedStage, check_head_dim, resolve_stages
from torchtitan_cp.data.corpus.tokenizer_files import find_tokenizers, name_tokenizer_file
from torchtitan_cp.metrics.throughput import layer_costs
from torchtitan_cp.optim.optimizers import OPTIMIZERS
from torchtitan_cp.parallel.checks import check_expert_parallel, check_tensor_parallel
from torchtitan_cp.parallel.pipeline_stages import plan_pipeline
from torchtitan_cp.training import registry

# training.loss_chunk_tokens where it is left out: larger chunks read the fp32 gradient of the output matrix less often,
# and a compiled chunk takes 4 bytes a logit in place of 10.
LOSS_CHUNK_TOKENS, COMPILED_LOSS_CHUNK_TOKENS = 1024, 4096


@dataclass(frozen=True)
class ResolvedRun:
    """A config that may run on this number of ranks, and what follows from that number.

    Attributes:
        config: with the defaults that depend on other keys, and on the device.
        stages: of the curriculum, each with its degrees and exchanges.
        model_args: sizes of the model; vocab_size is 0 where the tokenizer decides it.
        uncompiled: what excludes compiled blocks, where they would be the default; empty otherwise.
    """

    config: Config
    ranks: int
    stages: tuple[ResolvedStage, ...]
    model_args: ModelArgs
    uncompiled: str = ""

    @property
    def longest(self) -> int:
        """Sequence length of the longest stage, in tokens."""
        return max(stage.seq_len for stage in self.stages)

    def config_of(self, stage: ResolvedStage) -> Config:
        """The config with the tp, pp and activation memory of a stage."""
        return replace(self.config, activation=stage.activation).with_keys(parallel={"tp": stage.tp, "pp": stage.pp})


def resolve_run(config: Config, ranks: int, model_args: ModelArgs | None = None, *, device: str = "cpu") -> ResolvedRun:
    """Resolve a config for a number of ranks, or refuse it. First everything is resolved:

    - `with_defaults`: tokenizer, flavor and RoPE, of which a config.json may have a say.
    - `registry.model_args_of`: flavor, overrides and hub checkpoint.
    - `curriculum.resolve_stages`: each stage with its exchanges and its degrees, by `config.degrees.resolve_degrees`,
      which refuses a product that is not the number of ranks.
    - `_with_compile`: whether blocks are compiled, and the chunks of the loss.

    Then it is judged, and every rule is reached from here:

    - `config.check.check_config`: rules between keys. Lengths and batches that the ranks can share, micro-batches for
      the pipeline schedule, RoPE, data, gates. `curriculum.check_head_dim`: RoPE on these heads.
    - `registry.check_model`: degrees and flags that the architecture lacks, what this model cannot do, what excludes
      compiled blocks, and the biases that training.router_bias_update changes.
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
        device: type of device that the ranks compute on, as in torch.device.

    Raises:
        UserError, ContextParallelError: the first rule that is broken, with its fix.
    """
    config = with_defaults(config)
    args = model_args or registry.model_args_of(config.model)
    stages = resolve_stages(config, ranks, lambda degrees: choose_strategies(config, args, degrees))
    config, uncompiled = _with_compile(config, stages, args, device)
    check_config(config, stages, ranks)
    registry.check_model(config, stages, args)
    check_head_dim(stages, args.rotary_dim)
    for stage in stages if config.checkpoint.export != "no" else ():
        registry.config_for_hub(config.model, args, stage.seq_len, stage.rope)
    costs = layer_costs(args, max(stage.seq_len for stage in stages))
    for stage in stages:
        check_tensor_parallel(args, stage.tp)
        check_expert_parallel(args, config.parallel)
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
    OPTIMIZERS[config.optimizer.name].check(config, {stage.tp for stage in stages})
    return ResolvedRun(config, ranks, stages, args, uncompiled)


def _with_compile(
    config: Config, stages: tuple[ResolvedStage, ...], args: ModelArgs, device: str
) -> tuple[Config, str]:
    """The config with compile.enable and training.loss_chunk_tokens where it leaves them out.

    Returns:
        the config, and `ResolvedRun.uncompiled`.
    """
    enable, uncompiled = config.compile.enable, ""
    if enable is None:
        enable = device == "cuda"
        try:
            if enable:
                registry.check_compile(config, stages, args)
        except ConfigError as error:
            enable, uncompiled = False, error.message
    chunk = COMPILED_LOSS_CHUNK_TOKENS if enable and device == "cuda" else LOSS_CHUNK_TOKENS
    chunk = config.training.loss_chunk_tokens or chunk
    return config.with_keys(compile={"enable": enable}, training={"loss_chunk_tokens": chunk}), uncompiled


def layer_heads(args: ModelArgs) -> dict[int, tuple[int, int]]:
    """Query and key heads of the layers with each window; 0: no window, and the widest where each layer has one."""
    attending = [mixer for mixer in args.mixers if mixer.n_heads]
    first = {mixer.window: (mixer.n_heads, mixer.n_kv_heads) for mixer in reversed(attending)}
    return {0: (args.n_heads, args.n_kv_heads)} | dict(sorted(first.items()))


def choose_strategies(config: Config, args: ModelArgs, degrees: Degrees) -> dict[int, str]:
    """The exchange that `auto` takes for the layers with each window."""
    transfer, chosen = config.context_parallel.kv_transfer, {}
    for window, heads in layer_heads(args).items():
        query, key = (max(1, count // degrees.tp) for count in heads)  # that tp divides the heads is checked afterwards
        chosen[window] = choose_strategy(query, key, degrees.cp, AttentionMask().windowed(window).band, transfer)
    return chosen


def with_defaults(config: Config) -> Config:
    """The config with the defaults that depend on other keys: tokenizer, flavor, each stage's RoPE, and max_document.

    Where [tokenizer] names none, it is that of model.hub_checkpoint, if there is one: tokenizer.json, else
    tokenizer.model. Each RoPE key is taken as written, else from config.json, else it has its default. With an
    architecture that takes any config.json, a stage without `rope` keeps the model's own RoPE. Conversations are
    limited to the longest stage. What [model], [tokenizer] and `rope` leave out is that of the run that
    model.checkpoint names, if there is one.
    """
    config = _with_run(config)
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


def _with_run(config: Config) -> Config:
    """The config with what it leaves out, as in the run that model.checkpoint names.

    A config that leaves out nothing but ropes, such as the resolved one in a run's folder, holds without that run.
    """
    model, tokenizer = config.model, config.tokenizer
    if not model.checkpoint:
        return config
    lacks_tokenizer = tokenizer == Tokenizer(bos=tokenizer.bos)
    try:
        start = read_saved_run(Path(os.path.expanduser(model.checkpoint)))
    except ConfigError as error:
        if lacks_tokenizer or not model.names_a_model:
            raise ConfigError(f"model.checkpoint: {error.message}", fix=error.fix) from None
        return config
    if not model.names_a_model:
        model = replace(start.config.model, checkpoint=model.checkpoint)
    if lacks_tokenizer:
        tokenizer = start.config.tokenizer
    rope = start.stage.rope
    stages = tuple(replace(stage, rope=stage.rope or rope) for stage in config.curriculum.stages)
    return replace(config, model=model, tokenizer=tokenizer).with_keys(curriculum={"stages": stages})


def _with_hub_tokenizer(config: Config) -> Tokenizer:
    """The checkpoint's own tokenizer, if [tokenizer] names no other and asks for none of another size."""
    settings, start = name_tokenizer_file(config.tokenizer), registry.start_folder(config.model)
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
