"""What a model's blocks run in place of their own functions: recomputed, offloaded, in tiles, compiled."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchtitan_cp.attention.compiling import compile_rows, compile_whole
from torchtitan_cp.config.training import Activation, Compile
from torchtitan_cp.parallel.activation import checkpointed, tiled
from torchtitan_cp.parallel.offload import HostMemory

logger = logging.getLogger(__name__)


def wrap_blocks(model: nn.Module, activation: Activation, compiling: Compile, device_type: str, ep: int = 1) -> None:
    """Set up activation checkpointing, offloading and compile of the blocks, undoing what an earlier call set up.

    A block is compiled whole, but not where the host waits inside it for the number of tokens that experts get: where
    ranks share the experts, or the block has halves. Then its first half is compiled, if it has halves, and what lies
    between the products of its experts. Halves are recomputed each by itself.

    Args:
        ep: ranks that share the experts of a layer.
    """
    host = None
    if activation.offload and device_type == "cpu":
        logger.warning("activation.offload is inactive: on a CPU activations are in host memory")
    elif activation.offload:
        host = HostMemory(torch.device(device_type, torch.accelerator.current_device_index()))
    compiled, experts, gates = bool(compiling.enable), getattr(model, "experts", {}), getattr(model, "expert_gates", {})
    _unwrap(model)
    for key, layer in model.layers.items():  # type: ignore[operator, union-attr]
        number = int(key)
        halves = compiled and hasattr(layer, "attention_half")
        whole = compiled and not halves and not (ep > 1 and number in experts)
        if activation.mlp_tiles > 1:
            layer.mlp = tiled(layer.mlp, activation.mlp_tiles, gathers=hasattr(layer, "experts"))
        if halves:
            _wrap(layer, "attention_half", activation.checkpoint, host, compiled=True)
            _wrap(layer, "experts_half", activation.checkpoint, host, compiled=False)
        else:
            _wrap(layer, "forward", activation.checkpoint, host, compiled=whole)
        if compiled and not whole and number in gates:
            module, name = gates[number]
            setattr(module, name, compile_rows(getattr(module, name)))
        if host:  # around the compiled block, so that the hooks see all that it saves
            layer.forward = host.offload_saved(layer.forward, layer)


def _wrap(layer: nn.Module, name: str, kind: str, host: HostMemory | None, *, compiled: bool) -> None:
    """Have a function of a block recomputed in backward (see `checkpointed`), and compiled."""
    if kind != "none":
        setattr(layer, name, checkpointed(getattr(layer, name), kind, host, compiled=compiled))
    if compiled:  # equal blocks share the compiled code, and a second length makes it dynamic
        setattr(layer, name, compile_whole(getattr(layer, name)))


def _unwrap(model: nn.Module) -> list[tuple[nn.Module, dict[str, object]]]:
    """Undo what `wrap_blocks` set up.

    Returns:
        modules, each with the functions that it had in place of its own.
    """
    layers: Iterable[nn.Module] = model.layers.values()  # type: ignore[operator]
    gates: Iterable[tuple[nn.Module, str]] = getattr(model, "expert_gates", {}).values()
    wrapped = [(layer, ("forward", "mlp", "attention_half", "experts_half")) for layer in layers]
    replaced = [*wrapped, *((module, (name,)) for module, name in gates)]
    return [
        (module, {name: vars(module).pop(name) for name in names if name in vars(module)}) for module, names in replaced
    ]


@contextmanager
def uncompiled_blocks(model: nn.Module, activation: Activation, device_type: str) -> Iterator[None]:
    """A context in which no block is compiled. Afterwards they are as before, with the code that was compiled."""
    wrapped = _unwrap(model)
    try:
        wrap_blocks(model, activation, Compile(enable=False), device_type)
        yield
    finally:
        _unwrap(model)
        for module, functions in wrapped:
            vars(module).update(functions)
