"""What a small Llama needs beside its shape: plain attention, and a config in fp32."""

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.config import Config

BASE = Config()


def attend(q: Tensor, k: Tensor, v: Tensor, plan: object, window: int) -> Tensor:
    rows = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)


def config(**sections: dict[str, object]) -> Config:
    """fp32, with keys of sections replaced."""
    sections.setdefault("training", {}).update(seed=5, compute_dtype="float32")
    replaced = {name: dataclasses.replace(getattr(BASE, name), **keys) for name, keys in sections.items()}
    return dataclasses.replace(BASE, **replaced)
