"""Activation checkpointing of blocks, full or selective, and MLPs in tiles.

Forwards are replaced, not modules, so that parameters keep their names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan_cp.attention import OPERATORS
from torchtitan_cp.parallel.offload import HostMemory

Forward = Callable[..., Any]

# Ranges of the profiler: where experts inside a block are gathered ahead, FSDP opens others in its recomputation.
_RANGES = torch.ops.profiler
SAC_IGNORED_OPS.update((_RANGES._record_function_enter_new.default, _RANGES._record_function_exit._RecordFunction))

# Operators whose outputs cost more to compute than to keep; what lies between them is recomputed.
PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "_grouped_mm")}


def apply_activation_checkpointing(model: nn.Module, kind: str, host: HostMemory | None = None) -> None:
    """Save each block's input, and recompute the block in backward.

    Args:
        kind: `none` saves everything; `full` the block's input alone; `attention_saved` also what attention and
            gated delta rules give, so that they never run twice; `selective` also every matrix product.
        host: holds what `attention_saved` and `selective` keep, instead of the device.
    """
    if kind == "none":
        return
    contexts: Callable[[], Any] | None = None
    if host and kind != "full":
        contexts = host.save_outputs(partial(_is_kept, kind))
    elif kind != "full":
        contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kind))
    for layer in model.layers.values():  # type: ignore[operator]
        layer.forward = recomputed(layer.forward, contexts)


def recomputed(forward: Forward, contexts: Callable[[], Any] | None = None) -> Forward:
    """A forward that saves its inputs, and inside it what `contexts` selects; nothing by default."""
    options: dict[str, Any] = {"context_fn": contexts} if contexts else {}

    def run(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options, **named)

    return run


class Tiles:
    """Whether a tile of an MLP is running: its block does not save its products."""

    running = False


def _is_kept(kind: str, operator: Any) -> bool:
    return operator in OPERATORS or (kind == "selective" and operator in PRODUCTS and not Tiles.running)


def _policy(kind: str, _context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(kind, operator) else CheckpointPolicy.PREFER_RECOMPUTE


def tile_mlps(model: nn.Module, tiles: int) -> None:
    """Run each block's MLP and its norm on one tile of the sequence after the other.

    Only a tile's input is saved, so the wide activations exist for one tile at a time, forward and backward. A block's
    weights stay gathered meanwhile, except for experts that are sharded apart: these are gathered for each tile.
    Gradients are reduced once for all tiles. Source: ALST (Bekman et al., 2025).
    """
    if tiles > 1:
        for layer in model.layers.values():  # type: ignore[operator]
            layer.mlp = tiled(layer.mlp, tiles)


def tiled(forward: Callable[[Tensor], Tensor], tiles: int) -> Callable[[Tensor], Tensor]:
    """A function of each token alone, `[B, s, E] -> [B, s, E]`, a tile at a time."""
    run_tile = recomputed(forward)

    def run(hidden: Tensor) -> Tensor:
        parts = hidden.split(-(-hidden.shape[1] // tiles), 1)
        if torch.compiler.is_compiling():  # the tiles' own recomputation decides then
            return torch.cat([run_tile(part) for part in parts], 1)
        Tiles.running = True
        try:
            return torch.cat([run_tile(part) for part in parts], 1)
        finally:
            Tiles.running = False

    return run
