"""What a run with [lora] needs beside its checkpoints, which hold no frozen weights, and adapters in PEFT's format."""

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from torchtitan_cp.checkpoint.base import digest_weights
from torchtitan_cp.checkpoint.hub import WEIGHT_FILES, load_parts, read_shard
from torchtitan_cp.checkpoint.peft import (
    EXPERT_PROJECTIONS,
    PREFIX,
    Trained,
    adapter_config,
    check_adapter,
    check_whole_modules,
    hub_module,
    is_of_adapter,
    load_adapter,
    peft_names,
    save_adapter,
)
from torchtitan_cp.checkpoint.progress import FRESH, check_identity
from torchtitan_cp.checkpoint.weights import SavedModel
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.contract import LanguageModel, ModelArgs
from torchtitan_cp.config.json_types import JsonObject
from torchtitan_cp.config.training import Lora
from torchtitan_cp.parallel.lora import apply_lora, hidden_adapters, merged_state
from torchtitan_cp.parallel.lora_targets import find_targets
from torchtitan_cp.parallel.nf4 import fill_tables, whole_weights
from torchtitan_cp.training import registry
from torchtitan_cp.training.model import ParallelModel

logger = logging.getLogger(__name__)


def starts_from_weights(config: Config) -> bool:
    """Whether the run starts from the weights of model.hub_checkpoint."""
    return bool(config.model.hub_checkpoint and config.model.load_weights)


def adapter_identity(config: Config) -> JsonObject:
    """What must be the same to resume adapters: their settings, and the weights beside them.

    Raises:
        ConfigError: the weights of model.hub_checkpoint cannot be read.
    """
    if config.lora is None:
        return {"lora": "none"}
    settings = {name: list(x) if isinstance(x, tuple) else x for name, x in dataclasses.asdict(config.lora).items()}
    if not starts_from_weights(config):
        return {"lora": settings, "base weights": FRESH}
    digest = digest_weights(registry.hub_folder(config.model, WEIGHT_FILES))
    return {"lora": settings, "base weights": {"path": config.model.hub_checkpoint, "digest": digest}}


def load_adapted(model: LanguageModel, saved: SavedModel, lora: Lora) -> None:
    """Fill a whole model on the meta device: with adapters, on the host, from a checkpoint and the weights beside it.

    Args:
        lora: of the checkpoint; `base` may be another.

    Raises:
        ConfigError: there are no such weights, or they are others than the adapters were trained on.
    """
    config, names = saved.config, [name for name, _ in model.named_parameters()]
    if not starts_from_weights(config):
        raise ConfigError(
            f"{saved.path} has adapters of fresh weights, which no file holds",
            fix="train adapters of trained weights: set model.hub_checkpoint",
        )
    check_identity(saved.progress.identity, adapter_identity(config), saved.path, "name the weights that were adapted")
    apply_lora(model, lora)
    tied = model.output.weight is next(model.tok_embeddings.parameters())
    model.to_empty(device="cpu")
    fill_tables(model, torch.device("cpu"))
    if tied:  # to_empty makes two of them
        model.output.weight = next(model.tok_embeddings.parameters())
    folder, hub = registry.hub_folder(config.model, WEIGHT_FILES), registry.hub_of(config.model)
    with hidden_adapters([model]), whole_weights([model], read_shard) as read:
        load_parts(folder, [model], names, hub, read)
    model.load_state_dict(saved.read([name for name in model.state_dict() if name in saved.tensors]), strict=False)


def trained_parameters(config: Config, args: ModelArgs) -> dict[str, Trained]:
    """What a run with [lora] trains, by our names in the whole model."""
    assert config.lora
    model = registry.empty_model(config.model, args)
    apply_lora(model, config.lora)
    names = dict[nn.Parameter, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return {first: Trained(tuple(p.shape), tuple(others)) for p, (first, *others) in names.items()}


def load_initial_adapter(model: ParallelModel) -> None:
    """Load model.adapter into the adapters, and what is trained whole. Collective.

    Raises:
        ConfigError: it is of other settings or another model.
    """
    config, folder = model.config, Path(os.path.expanduser(model.config.model.adapter))
    assert config.lora
    check_adapter(folder, config.lora)
    load_adapter(folder, model.parts, trained_parameters(config, model.args), registry.hub_of(config.model))
    logger.info("adapters from %s", folder)


def write_adapter(saved: SavedModel, args: ModelArgs, out: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint's adapters, and what is trained whole beside them, as PEFT reads it.

    Raises:
        ConfigError: the format has no place for some of it.
    """
    config, hub = saved.config, registry.hub_of(saved.config.model)
    assert config.lora
    if config.training.router_bias_update:
        raise ConfigError(
            "PEFT's format has no place for the biases that training.router_bias_update changes",
            fix="export the whole model: --merge",
        )
    names = peft_names(trained_parameters(config, args), hub)
    tensors = saved.read(list(names))
    by_peft_name = {name: tensors[our].to(dtype).clone() for our, found in names.items() for name in found}
    whole = {name.removeprefix(PREFIX).rpartition(".")[0] for name in by_peft_name if not is_of_adapter(name)}
    model = registry.empty_model(config.model, args)
    found = find_targets(model, config.lora)
    check_whole_modules(model, found.trained)
    adapted = {model.get_submodule(name) for name in found.adapted}
    modules = [*model.named_modules(remove_duplicate=False)]  # a module that layers share has several names
    targets = [hub_module(name, hub) for name, module in modules if module in adapted]
    # With names of transformers all modules count; of ours only linear layers have a name there.
    others = [(name, module) for name, module in modules if module not in adapted]
    other_names = [hub_module(name, hub) for name, module in others if hub.load or isinstance(module, nn.Linear)]
    values = adapter_config(config.lora, config.model.hub_checkpoint, targets, other_names, sorted(whole))
    save_adapter(out, values, by_peft_name)
    if args.n_experts and (mistaken := [name for name in targets if name.endswith(EXPERT_PROJECTIONS)]):
        logger.warning(
            "PEFT may take the adapter of %s, and of all layers named %s, for experts', and leave it out: of many "
            "families 0.21 does so with transformers 5. Compare the logits, or export the whole model with --merge",
            *(mistaken[0], ", ".join(name[1:] for name in EXPERT_PROJECTIONS)),
        )


Tensors = tuple[dict[str, tuple[torch.Size, torch.dtype]], Callable[[list[str]], dict[str, Tensor]]]


def merged_tensors(saved: SavedModel, args: ModelArgs) -> Tensors:
    """The tensors of a checkpoint's whole model, adapters added to their weights, and a function that computes some.

    The model is in host memory, its frozen weights in bf16, also those that the run had in NF4.

    Raises:
        ConfigError: as `load_adapted`.
    """
    model, lora = registry.empty_model(saved.config.model, args), saved.config.lora
    assert lora
    load_adapted(model, saved, dataclasses.replace(lora, base="bfloat16"))
    state, sizes = merged_state(model), model.state_dict()
    tensors = {name: (sizes[name].shape, torch.float32) for name in state}
    return tensors, lambda names: {name: state[name]().detach() for name in names}


def load_base(model: ParallelModel) -> None:
    """Load the weights of model.hub_checkpoint, each rank its own shards; adapters stay as they are. Collective."""
    settings = model.config.model
    folder = registry.hub_folder(settings, WEIGHT_FILES)
    with hidden_adapters(model.parts), whole_weights(model.parts, read_shard) as read:
        load_parts(folder, model.parts, model.parameter_names, registry.hub_of(settings), read)
    logger.info("weights from %s", folder)
