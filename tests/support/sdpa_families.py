"""Families of transformers with `sdpa` attention in a context_parallel block, beside the same model on one process."""

import random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.huggingface_families import FAMILIES, REFUSED, WINDOW, Keys, random_weights
from torchtitan_cp.attention import AttentionMask, ContextParallel, PlanError, context_parallel

LENGTH, VOCABULARY = 48, 200
ALL = {**FAMILIES, **REFUSED}
IN_DOUBLE = ("dory",)  # its norms divide by small numbers: on one process, too, fp32 rounds by 1e-3


def sdpa_model(config: Keys, window: int) -> Any:
    """A model without dropout whose windows and chunks have `window` tokens; None: it cannot use sdpa."""
    keys = {key: _resized(key, value, window) for key, value in config.items() if key != "model_type"}
    described = AutoConfig.for_model(config["model_type"], **keys)
    try:
        model = AutoModelForCausalLM.from_config(described, attn_implementation="sdpa", dtype=torch.float32)
    except ValueError as error:
        if "does not support an attention implementation through" not in str(error):
            raise
        return None
    random_weights(model, 0)
    return (model.double() if config["model_type"] in IN_DOUBLE else model).eval()


def _resized(key: str, value: Any, window: int) -> Any:
    if isinstance(value, dict):
        return {name: _resized(name, one, window) for name, one in value.items()}
    return window if value == WINDOW and ("window" in key or "chunk" in key) else value


def outcome(
    config: Keys,
    window: int = 2 * LENGTH,
    lengths: tuple[int, ...] = (LENGTH,),
    mask: AttentionMask | None = None,
    layout: str = "auto",
) -> str:
    """On a rank: "no sdpa", "equal", the message that refuses the call, or the losses of one process and the ranks."""
    model, size = sdpa_model(config, window), sum(lengths)
    if model is None:
        return "no sdpa"
    text = torch.randint(3, VOCABULARY, (2, size + 1), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(2, 1)
    buffers = [text[:, :-1].clone(), text[:, 1:].clone(), positions]

    def loss(ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        options = {"attention_mask": torch.ones_like(ids), "position_ids": positions, "use_cache": False}
        logits = model(ids, **options).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * size)

    cp = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), "ring", layout=layout)
    with torch.no_grad():
        want = sum(loss(*document) for document in zip(*(x.split(lengths, 1) for x in buffers), strict=True))
        try:
            with context_parallel(cp, buffers, [1] * 3, mask=mask, model=model):
                got = loss(*buffers)
        except PlanError as error:
            return str(error)
    dist.all_reduce(got)
    return "equal" if abs(got - want) <= 2e-5 * want else f"silent: {want:.6f} {got:.6f}"


def outcomes(names: list[str], *arguments: Any) -> dict[str, str]:
    return {name: outcome(ALL[name], *arguments) for name in names}


def draw_lengths(seed: int, size: int = LENGTH) -> tuple[int, ...]:
    """Documents that sum to `size`; a third of them has one token."""
    draw, lengths = random.Random(seed), list[int]()
    while rest := size - sum(lengths):
        lengths.append(min(rest, draw.choice((1, draw.randint(1, 6), draw.randint(1, size)))))
    return tuple(lengths)
