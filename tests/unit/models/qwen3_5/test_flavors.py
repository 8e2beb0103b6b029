"""Published sizes hold as many numbers as they say."""

import dataclasses

import torch

from models.qwen3_5 import FLAVORS, Hybrid
from torchtitan_cp.training.model import LayerAttention


def test_every_size_holds_as_many_numbers_as_it_says() -> None:
    for name, published in FLAVORS.items():
        args = dataclasses.replace(published, vocab_size=published.vocab_size or 120)
        with torch.device("meta"):
            model = Hybrid(args, LayerAttention())
        layers = list(model.layers.parameters())
        matrices = sum(p.numel() for p in layers if p.ndim > 1) + args.dim * args.vocab_size
        assert (args.problem(), args.linear_parameters()) == (None, matrices), name
