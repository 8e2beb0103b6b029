"""What a run with [lora] needs beside its checkpoints, which hold no frozen weights: the base model, and its digest."""

import dataclasses
import logging

from torchtitan_cp.checkpoint.base import digest_weights
from torchtitan_cp.checkpoint.hub import WEIGHT_FILES, load_parts
from torchtitan_cp.checkpoint.progress import check_identity
from torchtitan_cp.checkpoint.weights import SavedModel
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.contract import LanguageModel
from torchtitan_cp.config.json_types import JsonObject
from torchtitan_cp.parallel.lora import apply_lora, hidden_adapters
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
        return {"lora": settings}
    digest = digest_weights(registry.hub_folder(config.model, WEIGHT_FILES))
    return {"lora": settings, "base weights": {"path": config.model.hub_checkpoint, "digest": digest}}


def load_adapted(model: LanguageModel, saved: SavedModel) -> None:
    """Fill a whole model on the meta device: with adapters, on the host, from a checkpoint and the weights beside it.

    Raises:
        ConfigError: there are no such weights, or they are others than the adapters were trained on.
    """
    config, names = saved.config, [name for name, _ in model.named_parameters()]
    assert config.lora
    if not starts_from_weights(config):
        raise ConfigError(
            f"{saved.path} has adapters of fresh weights, which no file holds",
            fix="train adapters of trained weights: set model.hub_checkpoint",
        )
    check_identity(saved.progress.identity, adapter_identity(config), saved.path, "name the weights that were adapted")
    apply_lora(model, config.lora)
    model.to_empty(device="cpu")
    with hidden_adapters([model]):
        load_parts(registry.hub_folder(config.model, WEIGHT_FILES), [model], names, registry.hub_of(config.model))
    model.load_state_dict(saved.read([name for name in model.state_dict() if name in saved.tensors]), strict=False)


def load_base(model: ParallelModel) -> None:
    """Load the weights of model.hub_checkpoint, each rank its own shards; adapters stay as they are. Collective."""
    settings = model.config.model
    folder = registry.hub_folder(settings, WEIGHT_FILES)
    with hidden_adapters(model.parts):
        load_parts(folder, model.parts, model.parameter_names, registry.hub_of(settings))
    logger.info("weights from %s", folder)
