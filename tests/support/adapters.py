"""Our models with adapters, and PEFT's of the same weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn

from models import ARCHITECTURES
from torchtitan_cp.checkpoint.hub import load_parts, read_shard
from torchtitan_cp.checkpoint.hub_rope import hub_rope
from torchtitan_cp.checkpoint.peft import PREFIX, Trained, peft_names
from torchtitan_cp.config.contract import LanguageModel
from torchtitan_cp.config.sections import Model
from torchtitan_cp.config.training import Lora
from torchtitan_cp.parallel.lora import apply_lora, hidden_adapters
from torchtitan_cp.parallel.nf4 import whole_weights
from torchtitan_cp.training import registry
from torchtitan_cp.training.model import cast_parameters, set_rope
from torchtitan_cp.training.plain_attention import PlainAttention


def adapted_model(architecture: str, folder: Path, lora: Lora) -> LanguageModel:
    """Our model on the weights of a folder, computing in fp32, with random values in all that is trained."""
    registry.register(ARCHITECTURES)
    settings = Model(architecture=architecture, hub_checkpoint=str(folder))
    args = registry.model_args_of(settings)
    model = registry.architecture(settings).build(args, PlainAttention())
    names = [name for name, _ in model.named_parameters()]
    apply_lora(model, lora)
    with hidden_adapters([model]), whole_weights([model], read_shard) as read:
        load_parts(folder, [model], names, registry.hub_of(settings), read)
    rope = None if architecture == "huggingface" else hub_rope(registry.hub_config(settings))
    set_rope(model, args, rope, 64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in cast_parameters(model, torch.float32).parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.1, generator=generator)
    return model


def tensors_by_peft_name(model: LanguageModel, architecture: str) -> dict[str, nn.Parameter]:
    """The trained parameters of our model by their names in PEFT's files."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    about = {name: Trained(tuple(parameter.shape)) for name, parameter in trained.items()}
    names = peft_names(about, registry.hub_of(Model(architecture=architecture)))
    return {name: trained[our] for our, found in names.items() for name in found}


def peft_model(base: nn.Module, lora: Lora, tensors: Mapping[str, Tensor]) -> Any:
    """PEFT's model of a model of transformers, with these tensors by their names in PEFT's files."""
    modules = {name.removeprefix(PREFIX).rpartition(".")[0] for name in tensors}
    config: Any = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        target_modules=[name.removesuffix(".lora_A") for name in modules if name.endswith(".lora_A")],
        modules_to_save=[name for name in modules if ".lora_" not in name] or None,
    )
    model: Any = peft.get_peft_model(base, config)
    peft.set_peft_model_state_dict(model, {name: tensor.detach() for name, tensor in tensors.items()})
    return model
