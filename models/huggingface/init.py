"""First weights and buffers of a causal LM: each tensor drawn by itself, by the rules of its own class."""

import copy
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal LM without memory, in fp32."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)


class Initializer:
    """Draws the first weights of a model one at a time, so that no rank holds more than one whole tensor.

    The rules are transformers' `_init_weights`, called on a copy of the model on the meta device, in which one
    parameter at a time is real. A parent may initialize its child, so all modules around the parameter are asked,
    the inner first.

    Args:
        config: of the causal LM.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.shadow = on_meta(config)

    @torch.no_grad()
    def parameter(self, name: str, seed: int, device: torch.device) -> Tensor:
        """A whole parameter in fp32. It depends on its name, the seed and the type of the device alone.

        NaN is what its class leaves to a checkpoint.
        """
        owner_name, _, leaf = name.rpartition(".")
        owner = self.shadow.get_submodule(owner_name)
        meta = owner._parameters[leaf]
        assert meta is not None, name
        values = torch.full(meta.shape, torch.nan, device=device)
        owner._parameters[leaf] = nn.Parameter(values, requires_grad=False)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        try:
            # They draw from the generators that all code shares.
            with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
                torch.manual_seed(int.from_bytes(digest[:7], "big"))
                self._initialize(_with_parents(owner_name))
        finally:
            owner._parameters[leaf] = meta
        return values

    @torch.no_grad()
    def buffers(self, device: torch.device) -> dict[str, Tensor]:
        """All buffers by name, those of no state dict too. NaN is what a checkpoint has to supply.

        Raises:
            ValueError: the model does not say how one of no state dict is computed.
        """
        owners = [(name, module) for name, module in self.shadow.named_modules() if module._buffers]
        for _, module in owners:
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    unset = torch.nan if buffer.is_floating_point() else 0
                    module._buffers[leaf] = torch.full_like(buffer, unset, device="cpu")
        around = {parent for name, _ in owners for parent in _with_parents(name)}
        # A module is named before the modules in it.
        self._initialize(name for name, _ in reversed(list(self.shadow.named_modules())) if name in around)
        found, saved = dict(self.shadow.named_buffers(remove_duplicate=False)), self.shadow.state_dict()
        for name, buffer in found.items():
            if buffer.isnan().any() and name not in saved:
                raise ValueError(f"the buffer {name} of {type(self.shadow).__name__} has no first values")
        return {name: buffer.to(device) for name, buffer in found.items()}

    def _initialize(self, names: Iterable[str]) -> None:
        """Call `_init_weights` on these modules, each of the model that is nearest around it."""
        for name in names:
            around = (self.shadow.get_submodule(parent) for parent in _with_parents(name))
            model = next(module for module in around if isinstance(module, PreTrainedModel))
            model._init_weights(self.shadow.get_submodule(name))


def _with_parents(name: str) -> list[str]:
    """A module's name, and those of all modules around it, the inner first."""
    pieces = name.split(".") if name else []
    return [".".join(pieces[:length]) for length in range(len(pieces), -1, -1)]
