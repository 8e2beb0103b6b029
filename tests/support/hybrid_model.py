"""A small Qwen3.5 with weights at random, and its names in transformers."""

import dataclasses
from typing import Any

import torch

from models.qwen3_5 import FLAVORS, Hybrid, HybridArgs
from models.qwen3_5.hub import NAMES
from torchtitan_cp.checkpoint.hub import hub_names
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.curriculum import rope_frequencies

ARGS = dataclasses.replace(FLAVORS["debug"], vocab_size=120)
TOKENS = 150  # more than two chunks of the gated delta rule
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def build(args: HybridArgs, attend: Any) -> Hybrid:
    """Random weights, none of them zero or one."""
    model = Hybrid(args, attend)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15, generator=generator)
    model.set_rope(*rope_frequencies(Rope(theta=1e4), args.rotary_dim, TOKENS), torch.device("cpu"))
    return model


def names_of(model: Hybrid) -> dict[str, str]:
    """Our names -> theirs."""
    return {name: hub_names(name, p.shape, NAMES)[0][0] for name, p in model.named_parameters()}
