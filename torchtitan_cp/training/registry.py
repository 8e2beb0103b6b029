"""Architectures by name, as the commands registered them, and the sizes of a config's model.

"ModelArgs" are these sizes; each architecture has a class for them: LlamaArgs, MoeArgs, HybridArgs, HuggingFaceArgs.
"""

import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchtitan_cp.checkpoint.hub import refuse_without_weights
from torchtitan_cp.checkpoint.hub_rope import rope_parameters
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.check import check_compiled_pipeline
from torchtitan_cp.config.contract import AnyArchitecture, Attend, Hub, HubConfig, LanguageModel, ModelArgs
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.load import build
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.sections import Model
from torchtitan_cp.config.training import Lora
from torchtitan_cp.curriculum import ResolvedStage
from torchtitan_cp.parallel.lora_targets import LoraCounts, check_targets, count_trained, find_targets
from torchtitan_cp.training.read_back import check_rotaries

logger = logging.getLogger(__name__)

DEFAULT_FLAVOR = "debug"
_ARCHITECTURES: dict[str, AnyArchitecture] = {}
_downloads: dict[tuple[str, str], Path] = {}  # by name on the hub, and pattern


class _NoAttention:
    """Stands for the attention of a model that never runs."""

    def __getattr__(self, name: str) -> "_NoAttention":
        return self


NO_ATTENTION = cast(Attend, _NoAttention())


def register(architectures: Iterable[AnyArchitecture]) -> None:
    """Add architectures by name."""
    _ARCHITECTURES.update({architecture.name: architecture for architecture in architectures})


def architecture(model: Model) -> AnyArchitecture:
    """The architecture that [model] names.

    Raises:
        ConfigError: it is not registered.
    """
    if model.architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ConfigError(f"model.architecture = {model.architecture!r} is not known", fix=f"use one of {known}")
    chosen = _ARCHITECTURES[model.architecture]
    if chosen.needs:
        import_extra(chosen.needs, extra="hub", needed_by=f"model.architecture = {chosen.name!r}", pinned=True)
    return chosen


def empty_model(model: Model, args: ModelArgs, attend: Attend = NO_ATTENTION) -> LanguageModel:
    """The whole model that [model] names, of these ModelArgs, on the meta device."""
    with torch.device("meta"), _WithoutFirstValues():
        return architecture(model).build(args, attend)


class _WithoutFirstValues(TorchFunctionMode):
    """Modules leave out the first values of tensors on the meta device. Drawing them imports torch's compiler."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            tensor = args[0] if args else kwargs["tensor"]
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def check_model(config: Config, stages: Iterable[ResolvedStage], args: ModelArgs) -> None:
    """Refuse options that the architecture, or the model of these args, does not support.

    Raises:
        ConfigError: naming the key, and the reason.
    """
    if config.compile.enable:
        check_compile(config, stages, args)
    for stage in stages:
        _check_lacks(config, stage)
        check_length(args, f"{stage.where}.seq_len", stage.seq_len)
        if problem := stage.rope and args.rope_problem(stage.rope.kind):
            raise ConfigError(f"{stage.where}.rope: {problem}", fix="leave it out; the model keeps its own")
    check_length(args, "evaluation.position_seq_len", config.evaluation.position_seq_len)
    for length in config.evaluation.passkey.lengths:
        check_length(args, "evaluation.passkey.lengths", length)
    if config.training.router_bias_update:
        sizes = dataclasses.replace(args, vocab_size=args.vocab_size or 1)
        model = empty_model(config.model, sizes) if args.n_experts else None
        if not getattr(model, "router_biases", None):
            raise ConfigError(
                f"training.router_bias_update = {config.training.router_bias_update} is for routers that choose "
                "experts by scores plus a bias, and this model has none",
                fix='leave it out, or set model.overrides = {expert_bias = true} with model.architecture = "moe"',
            )


def check_compile(config: Config, stages: Iterable[ResolvedStage], args: ModelArgs) -> None:
    """Refuse what compiled blocks exclude, as if compile.enable were true.

    Raises:
        ConfigError: naming the key, and the reason.
    """
    _check_lack(config.model, "compile.enable", True)
    if args.compile_conflict:
        raise ConfigError(
            f"compile.enable is not supported by this model: {args.compile_conflict}", fix="set compile.enable = false"
        )
    for stage in stages:
        check_compiled_pipeline(config, stage)
        conflict = args.compile_checkpoint_conflict(config.parallel.ep)
        if stage.activation.checkpoint != "none" and conflict:
            raise ConfigError(
                f"compile.enable and activation.checkpoint = {stage.activation.checkpoint!r} exclude each other here: "
                f"{conflict}",
                fix="leave one of them out",
            )


def check_length(args: ModelArgs, key: str, tokens: int) -> None:
    """Refuse sequences longer than the model's table of learned positions.

    Args:
        key: the key or thing that gives the length, for the message.

    Raises:
        ConfigError: the table is shorter.
    """
    if 0 < args.longest < tokens:
        raise ConfigError(
            f"{key} = {tokens} is longer than this model's table of {args.longest} learned positions",
            fix=f"give at most {args.longest}, take a model with a rotary embedding, or train fresh weights with "
            f"model.overrides = {{max_position_embeddings = {tokens}}}",
        )


def _check_lacks(config: Config, stage: ResolvedStage) -> None:
    """Refuse degrees above 1 and flags that the architecture does not support."""
    for key in architecture(config.model).lacks:
        section, name = key.split(".")
        stage_sections = {"parallel": stage, "activation": stage.activation}
        _check_lack(config.model, key, getattr(stage_sections.get(section, getattr(config, section)), name))


def _check_lack(model: Model, key: str, value: object) -> None:
    """Refuse this value of a key if it is above 1, or a flag that is on, and the architecture does not support it."""
    reason, off = architecture(model).lacks.get(key), False if isinstance(value, bool) else 1
    if reason and value != off:
        raise ConfigError(
            f"{key} is not supported by the architecture {model.architecture!r}: {reason}",
            fix=f"set {key} = {str(off).lower()}, or use another model.architecture",
        )


def trained_names(model: LanguageModel, lora: Lora | None) -> list[str]:
    """Names of all parameters that are trained, of a whole model without adapters.

    Raises:
        ConfigError: a pattern of [lora] finds nothing.
    """
    if lora is None:
        return [name for name, _ in model.named_parameters()]
    check_targets(model, lora)
    return find_targets(model, lora).parameters


def lora_counts(model: LanguageModel, args: ModelArgs, lora: Lora) -> LoraCounts:
    """Numbers that [lora] trains in a whole model without adapters."""
    return count_trained(model, lora, args.experts_per_token / max(1, args.n_experts))


def model_args_of(model: Model) -> ModelArgs:
    """The ModelArgs of [model]: the flavor's sizes, or config.json's where no flavor is set, with overrides.

    Its vocab_size is 0 where the tokenizer decides it.

    Raises:
        ConfigError: an unknown flavor or override, an override of the wrong type, sizes that do not fit each other or
            are not those of config.json, or weights that are quantized.
    """
    if model.hub_checkpoint and model.config:
        raise ConfigError(
            "model.hub_checkpoint and model.config both say what the model is",
            fix="leave out model.config, or model.hub_checkpoint for fresh weights",
        )
    if model.hub_checkpoint and model.load_weights:
        config = hub_config(model)
        if any(isinstance(part, dict) and part.get("quantization_config") for part in (config, *config.values())):
            fix = "use a checkpoint in bfloat16 or float32, or model.load_weights = false for fresh weights"
            raise _config_error(model, ": its weights are quantized (quantization_config)", fix)
    if read := architecture(model).args_of:
        return _args_of_config(model, read)
    flavors, flavor = architecture(model).flavors, model.flavor or DEFAULT_FLAVOR
    if flavor not in flavors:
        raise ConfigError(f"model.flavor = {flavor!r} is not known", fix=f"use one of {', '.join(flavors)}")
    hub_sizes = _hub_sizes(model) if has_hub_config(model) else {}
    args = flavors[flavor] if model.flavor else dataclasses.replace(flavors[flavor], **hub_sizes)
    args = args_from(model, sizes_of(args) | model.overrides)
    if problem := args.problem():
        raise ConfigError(f"model {flavor} with its overrides: {problem}", fix="change model.overrides")
    if hub_sizes and not args.vocab_size and (model.load_weights or "vocab_size" not in model.overrides):
        args = dataclasses.replace(args, vocab_size=hub_sizes["vocab_size"])
    if model.hub_checkpoint and model.load_weights:
        _check_hub_sizes(model, args, hub_sizes)
    return args


def sizes_of(args: ModelArgs) -> HubConfig:
    """ModelArgs as plain JSON values, with lists for tuples."""
    return dict(json.loads(json.dumps(dataclasses.asdict(args))))


def args_from(model: Model, sizes: Mapping[str, object]) -> ModelArgs:
    """ModelArgs of the architecture that [model] names: the inverse of `sizes_of`.

    Raises:
        ConfigError: model.overrides brought an unknown size, or one of the wrong type.
    """
    chosen = architecture(model)
    args_type = chosen.args_type() if chosen.args_type else type(next(iter(chosen.flavors.values())))
    return build(args_type, sizes, where="model.overrides", file=f"the architecture {model.architecture!r}")


def hub_of(model: Model) -> Hub:
    """How the architecture looks in Hugging Face's format.

    Raises:
        ConfigError: it has no such format.
    """
    hub = architecture(model).hub
    if hub is None:
        raise ConfigError(
            f"the architecture {model.architecture!r} has no names in Hugging Face's format",
            fix="use another architecture, or add them as models/llama/hub.py has them",
        )
    return hub


def config_for_hub(model: Model, args: ModelArgs, length: int, rope: Rope | None) -> HubConfig:
    """ModelArgs with the keys of Hugging Face's config.json.

    Args:
        length, rope: as trained; included only if the architecture's hub has `load`. transformers must then compute the
            frequencies of training from it.

    Raises:
        ConfigError: the format cannot express them.
    """
    hub = hub_of(model)
    as_trained = (length, rope and rope_parameters(rope, args.rotary_dim)) if hub.load else ()
    try:
        config = dict(hub.config(args, *as_trained))
        if hub.load:
            check_rotaries(config, rope, args.rotary_dim, length, sizes_of(args)["config"])
        return config
    except ValueError as error:
        raise ConfigError(
            f"the model cannot be written in Hugging Face's format: {error}",
            fix='train one without it, with checkpoint.export = "no"',
        ) from None


def has_hub_config(model: Model) -> bool:
    """Whether the sizes come from a config.json."""
    return bool(model.hub_checkpoint or model.config)


def _args_of_config(model: Model, read: Callable[..., ModelArgs]) -> ModelArgs:
    """ModelArgs of an architecture that takes any config.json and has no flavors."""
    if model.flavor or not has_hub_config(model):
        raise ConfigError(
            f"the architecture {model.architecture!r} takes its sizes from a config.json"
            + (f", not from model.flavor = {model.flavor!r}" if model.flavor else ", and there is none"),
            fix="set model.hub_checkpoint, or for fresh weights model.config, and leave out model.flavor",
        )
    try:
        return read(hub_config(model), model.overrides)
    except (ValueError, TypeError, KeyError) as error:
        others = [(other.name, other.hub) for other in _ARCHITECTURES.values() if other.hub and not other.args_of]
        names = [repr(name) for name, hub in others if _accepts(hub, hub_config(model))]
        fix = f"set model.architecture = {' or '.join(names)}" if names else "use another model"
        if model.overrides:
            fix = f"change model.overrides, or {fix}"
        raise _config_error(model, f": {error}", fix) from None


def _accepts(hub: Hub, config: HubConfig) -> bool:
    """Whether an architecture can read its sizes from a config.json."""
    try:
        return bool(hub.sizes(config))
    except (ValueError, TypeError, KeyError):
        return False


def _hub_sizes(model: Model) -> HubConfig:
    """Sizes in config.json, named as in ModelArgs."""
    try:
        return hub_of(model).sizes(hub_config(model))
    except (KeyError, ValueError, TypeError) as error:
        problem = f" has no {error}" if isinstance(error, KeyError) else f": {error}"
        others = [repr(other.name) for other in _ARCHITECTURES.values() if other.args_of]
        fix = f"use another checkpoint, or try model.architecture = {' or '.join(others)}, which takes most models"
        raise _config_error(model, problem, fix) from None


def hub_config(model: Model) -> HubConfig:
    """The config.json of model.hub_checkpoint or model.config.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        path = _config_path(model)
        return dict(json.loads(_read_text(path, _file_identity(path))))
    except (OSError, ValueError, TypeError) as error:
        fix = "give a folder with config.json (and *.safetensors for weights), as `hf download --local-dir` makes it; "
        fix += f"a path is relative to the current directory, {Path.cwd()}"
        raise _config_error(model, f" cannot be read: {getattr(error, 'strerror', error)}", fix) from None


@lru_cache(maxsize=16)
def _read_text(path: Path, identity: tuple[int, ...]) -> str:
    """The text of a file, read again once its identity has changed: several rules ask for one config.json."""
    return path.read_text(encoding="utf-8")


def _file_identity(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def start_config(model: Model, args: ModelArgs) -> HubConfig:
    """The config.json of the text model; with transformers' defaults, of an architecture that takes any."""
    config = sizes_of(args)["config"] if architecture(model).args_of else hub_config(model)
    return dict(config["text_config"]) if "text_config" in config else config


def _config_error(model: Model, problem: str, fix: str) -> ConfigError:
    key = "hub_checkpoint" if model.hub_checkpoint else "config"
    return ConfigError(f"model.{key}: {_config_path(model)}{problem}", fix=fix)


def _config_path(model: Model) -> Path:
    if model.hub_checkpoint:
        return hub_folder(model) / "config.json"
    path = Path(os.path.expanduser(model.config))
    return path / "config.json" if path.is_dir() else path


def hub_folder(model: Model, pattern: str = "config.json") -> Path:
    """The folder of model.hub_checkpoint. If it is a name on the hub, its files are first downloaded, once a process.

    Args:
        pattern: which files to download besides the small ones: settings, tokenizer and chat template.

    Raises:
        ConfigError: they cannot be downloaded.
    """
    name = model.hub_checkpoint
    if not is_on_hub(model):
        return Path(os.path.expanduser(name))
    if (known := _downloads.get((name, pattern))) and known.exists():
        return known
    hub = import_extra("huggingface_hub", extra="hub", needed_by=f"model.hub_checkpoint = {name!r}")
    try:
        patterns = ["*.json", "*.jinja", "tokenizer*", pattern]
        _downloads[name, pattern] = folder = Path(hub.snapshot_download(name, allow_patterns=patterns))
        return folder
    except Exception as error:  # the network, the server and the cache have their own
        raise _download_error(name, error) from None


def _download_error(name: str, error: Exception) -> ConfigError:
    """Why a name on the hub has no files here, by the types of huggingface_hub.errors."""
    kinds, [reason, *_] = [kind.__name__ for kind in type(error).__mro__], str(error.__cause__ or error).splitlines()
    here = f"model.hub_checkpoint: there is no folder {name}"
    if "GatedRepoError" in kinds:
        return ConfigError(
            f"{here}, and on the hub it is given only to those who accept its conditions ({reason})",
            fix=f"accept them on the page of {name}, and log in by `hf auth login`",
        )
    if "RepositoryNotFoundError" in kinds:
        return ConfigError(
            f"{here}, and the hub has none of this name for this user ({reason})",
            fix="correct the folder or the name, or log in by `hf auth login` if it is private",
        )
    return ConfigError(
        f"{here}, and downloading it from the hub failed: {reason}",
        fix=f"give a folder with config.json and *.safetensors; on a machine that reaches the hub, "
        f"`hf download {name} --local-dir FOLDER` makes one",
    )


def is_on_hub(model: Model) -> bool:
    """Whether model.hub_checkpoint is a name on the hub, not a folder."""
    name = model.hub_checkpoint
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)) and not Path(os.path.expanduser(name)).exists()


def check_files_on_hub(model: Model) -> None:
    """Refuse a name on the hub that has no weights in safetensors files, as far as the hub can be asked now.

    Raises:
        ConfigError: it has none.
    """
    hub = import_extra("huggingface_hub", extra="hub", needed_by=f"model.hub_checkpoint = {model.hub_checkpoint!r}")
    try:
        names = sorted(hub.HfApi().list_repo_files(model.hub_checkpoint))
    except Exception as error:  # as in hub_folder; its cache may hold what is needed
        return logger.debug("the files of %s on the hub are unknown: %s", model.hub_checkpoint, error)
    refuse_without_weights(model.hub_checkpoint, names)


def start_folder(model: Model) -> Path | None:
    """The folder of model.hub_checkpoint; None without one."""
    return hub_folder(model) if model.hub_checkpoint else None


def _check_hub_sizes(model: Model, args: ModelArgs, hub_sizes: HubConfig) -> None:
    """Refuse a flavor or overrides that contradict the hub checkpoint."""
    differing = {name: size for name, size in hub_sizes.items() if getattr(args, name) != size}
    # Different values of `windows` can give every layer the same window.
    windows = differing.get("windows")
    if windows is not None and dataclasses.replace(args, windows=windows).mixers == args.mixers:
        del differing["windows"]
    if differing:
        differences = ", ".join(f"{name} = {getattr(args, name)!r}, not {size!r}" for name, size in differing.items())
        set_keys = " and ".join(f"model.{key}" for key in ("flavor", "overrides") if getattr(model, key))
        raise ConfigError(
            f"{set_keys} contradicts model.hub_checkpoint = {model.hub_checkpoint!r}: {differences}",
            fix=f"leave out {set_keys}, as the sizes are the checkpoint's (on a command line --model.flavor=), or set "
            "model.load_weights = false for fresh weights of these sizes",
        )
