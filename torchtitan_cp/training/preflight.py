"""What a run needs on this machine: corpus, folder, tokenizer, kernel, extras and weights to start from.

`check` and the start of every rank ask here, before the corpus is prepared, which may take hours. Nothing is written.
The launcher waits for this, so the module imports nothing that only training needs.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from torchtitan_cp.attention.kernels import KERNELS, Case
from torchtitan_cp.checkpoint.hub import WEIGHT_FILES, check_weights
from torchtitan_cp.checkpoint.peft import check_adapter
from torchtitan_cp.checkpoint.progress import differing
from torchtitan_cp.checkpoint.saved_run import read_saved_run
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.run_folder import CHECKPOINTS, check_run_folder
from torchtitan_cp.config.sections import Tokenizer
from torchtitan_cp.data.corpus.cache import CacheBuilder, UnpreparedText
from torchtitan_cp.data.corpus.chat import find_chat_template
from torchtitan_cp.data.corpus.documents import check_corpus
from torchtitan_cp.data.corpus.tokenizer import load_tokenizer, other_pieces, vocabulary_size
from torchtitan_cp.data.corpus.tokenizer_files import find_tokenizers
from torchtitan_cp.data.errors import DataError
from torchtitan_cp.optim.rules import check_rules
from torchtitan_cp.parallel.float8 import check_float8
from torchtitan_cp.parallel.nf4 import check_nf4
from torchtitan_cp.training import registry
from torchtitan_cp.training.resolve import ResolvedRun, with_defaults


def check_files(config: Config, *, reads_corpus: bool = True) -> None:
    """Check what a run reads and writes on this machine: corpus, chat template and the run's folder.

    Args:
        reads_corpus: False for comparisons, which take random tokens.

    Raises:
        UserError: one of them cannot be used.
    """
    if reads_corpus:
        check_corpus(config.data)
    for source in config.data.by_name().values():
        if source.conversations:
            find_chat_template(source, config.tokenizer, registry.start_folder(config.model))
    check_run_folder(config.job.dump_folder)


def find_unprepared_text(config: Config) -> UnpreparedText | None:
    """What a run of the config would tokenize before its first step; None if its tokens are in the cache.

    Raises:
        UserError: as `check_files`.
    """
    config = with_defaults(config)
    start = registry.start_folder(config.model)
    return CacheBuilder(config.data, config.tokenizer, lambda: False, start).find_unprepared()


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
    if config.compile.enable and device == "cuda":
        check_compiler()
    if config.training.float8 != "none":
        check_float8(config.training.float8, device)
    if config.optimizer.state == "8bit":
        import_extra("torchao.optim", extra="float8", needed_by="optimizer.state = '8bit'")
    if config.lora and config.lora.base == "nf4":
        check_nf4()
    if config.optimizer.groups or config.lora:
        names = registry.trained_names(registry.empty_model(config.model, args), config.lora)
        check_rules(config.optimizer.groups, names)
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
        if config.model.checkpoint and not has_checkpoints(config):
            _check_run_weights(config, args)
        if config.lora and config.model.adapter and not has_checkpoints(config):
            check_adapter(Path(os.path.expanduser(config.model.adapter)), config.lora)
    return args


def check_compiler() -> None:
    """Refuse to compile for CUDA without a C compiler, which Triton looks for in this order (runtime/build.py)."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise ConfigError(
            "blocks are compiled on CUDA, for which Triton needs a C compiler, and there is neither gcc nor clang here",
            fix="install one (apt-get install gcc), or set compile.enable = false",
        )


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
    """Check that the weights of model.hub_checkpoint are whole and fit these args, if the run loads them.

    Args:
        download: those of a name on the hub are downloaded first; otherwise only its list of files is looked at.

    Raises:
        ConfigError: there are none, they are damaged, or of another model.
    """
    model = config.model
    if not _loads_hub_weights(config):
        return
    try:
        if registry.is_on_hub(model) and not download:
            registry.check_files_on_hub(model)
        else:
            folder = registry.hub_folder(model, WEIGHT_FILES)
            check_weights(folder, registry.empty_model(model, args), registry.hub_of(model))
    except ConfigError as error:
        if not has_checkpoints(config):
            raise
        raise ConfigError(
            f"the checkpoints in {config.job.dump_folder} hold adapters alone, and the weights that they adapt are "
            f"missing: {error.message}",
            fix=error.fix,
        ) from None


def _loads_hub_weights(config: Config) -> bool:
    """Whether the run loads model.hub_checkpoint: it does not resume, or has only adapters in its checkpoints."""
    loads = config.model.loads_weights and not config.model.checkpoint
    return loads and (config.lora is not None or not has_checkpoints(config))


def _check_run_weights(config: Config, args: ModelArgs) -> None:
    """Refuse the weights of model.checkpoint if they are adapters, of another model, or of ids that mean other text.

    Its files are verified when they are loaded. A tokenizer of that run that is no longer there is not compared.

    Args:
        config: as `with_defaults` returns it.
        args: ModelArgs, with the vocabulary set.

    Raises:
        UserError: there is no such checkpoint; naming the sizes, or the first id, that differ.
    """
    name = f"model.checkpoint = {config.model.checkpoint!r}"
    start = read_saved_run(Path(os.path.expanduser(config.model.checkpoint)))
    if start.config.lora:
        raise ConfigError(
            f"{name} is of a run with [lora], whose checkpoints hold adapters alone",
            fix="merge them (torchtitan-cp export --merge), and set model.hub_checkpoint to the folder that it makes",
        )
    ours, theirs, fix = config.tokenizer, start.config.tokenizer, "leave out [tokenizer] to take that run's"
    if ours.trained:
        raise ConfigError(
            f"the embeddings of {name} are of its run's tokenizer, and [tokenizer] asks for one that is trained on the "
            "corpus",
            fix=fix,
        )
    with suppress(DataError):
        if ours != theirs and (others := other_pieces(load_tokenizer(ours), load_tokenizer(theirs))):
            raise ConfigError(
                f"the tokenizer {ours.path or ours.kind} is not that of {name}, {theirs.path or theirs.kind}: "
                f"{len(others)} ids mean other text, the first of them {others[0]}",
                fix=fix,
            )
    here, there = config.model.architecture, start.config.model.architecture
    sizes = registry.sizes_of(args)
    if here != there or sizes != start.sizes:
        was, now = (there, here) if here != there else differing(start.sizes, sizes)
        raise ConfigError(
            f"{name} is of another model: {was} there, {now} here",
            fix="leave out the other keys of [model] to take that run's, or give a run of this model",
        )


def check_hub_tokenizer(config: Config) -> None:
    """Refuse weights of model.hub_checkpoint under a tokenizer whose ids mean other text, unless the run resumes.

    Added and special tokens may differ, as those of a base model and its chat model do. A checkpoint without
    tokenizer.json and tokenizer.model goes with any tokenizer but one that the corpus is yet to make.

    Args:
        config: as `with_defaults` returns it.

    Raises:
        UserError: naming the tokenizer, and the first id that differs.
    """
    if not _loads_hub_weights(config):
        return
    settings, name = config.tokenizer, config.model.hub_checkpoint
    start = registry.start_folder(config.model)
    files = find_tokenizers(start) if start else {}
    if settings.trained:
        problem = "[tokenizer] asks for one that is trained on the corpus"
        fix = f"leave out tokenizer.vocab_size = {settings.vocab_size}"
        if not files:
            problem = "its folder has neither tokenizer.json nor tokenizer.model, and [tokenizer] names none"
            fix = "put that tokenizer into the folder, or name it by tokenizer.kind and tokenizer.path"
        raise ConfigError(
            f"the embeddings of model.hub_checkpoint = {name!r} are of its own tokenizer, and {problem}",
            fix=f"{fix}, or set model.load_weights = false",
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
