"""First weights and buffers of a causal LM, drawn one tensor at a time by the rules of its class."""

import copy

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def on_meta(config: PreTrainedConfig, attention: str = "eager") -> PreTrainedModel:
    """The causal LM with the attention of this name, in fp32: parameters on the meta device, buffers on the CPU.

    Buffers have the values of a model that was never on the meta device. NaN marks values that a checkpoint has to
    supply.

    Raises:
        ValueError: the model does not initialize a buffer that its state dict lacks.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                unset = torch.nan if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, unset, device="cpu")
    with torch.device("cpu"):  # the caller may be building on meta
        model.initialize_weights()
    saved = model.state_dict()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer.isnan().any() and name not in saved:
            raise ValueError(f"the buffer {name} of {type(model).__name__} is not initialized")
    return model


class Initializer:
    """Draws the first weights of a model one at a time, so that no rank holds more than one whole tensor.

    The rules are transformers' `initialize_weights`, called on a copy of the model on the meta device, in which one
    parameter at a time is real. It visits inner modules first and skips those marked as initialized. A parent may
    initialize its child, so no module around the parameter is marked.

    Args:
        config: of the causal LM.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.shadow = on_meta(config)

    @torch.no_grad()
    def parameter(self, name: str, seed: int, device: torch.device) -> Tensor:
        """A whole parameter in fp32, which depends only on its name, its seed and the type of the device.

        NaN marks values that its class leaves to a checkpoint.
        """
        owner_name, _, leaf = name.rpartition(".")
        owner = self.shadow.get_submodule(owner_name)
        meta = owner._parameters[leaf]
        assert meta is not None, name
        values = torch.full(meta.shape, torch.nan, device=device)
        owner._parameters[leaf] = nn.Parameter(values, requires_grad=False)
        try:
            # The rules draw from the global generators.
            with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
                torch.manual_seed(seed)
                for around, module in self.shadow.named_modules():
                    vars(module)["_is_hf_initialized"] = not name.startswith(f"{around}." if around else "")
                self.shadow.initialize_weights()
        finally:
            owner._parameters[leaf] = meta
        return values

    def restore_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Give all buffers of a model on this device their first values."""
        for name, buffer in self.shadow.named_buffers(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, buffer.to(device, copy=True))
