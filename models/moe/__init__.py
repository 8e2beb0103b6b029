"""A mixture of experts on Llama's attention, as in Qwen3-MoE and OLMoE: sizes by name, and the model."""

from models.architecture import Architecture
from models.moe.flavors import FLAVORS, PUBLISHED_ROPE, MoeArgs
from models.moe.hub import HUB
from models.moe.model import Moe

# What this architecture lacks because of its balance loss; see `lacks` in models/architecture.py.
LACKS = {
    "parallel.tp": "its experts are not sharded over tensor-parallel ranks",
    "parallel.pp": "the balance loss of all layers is part of the loss, which only the last pipeline stage has",
    "compile.enable": "the number of tokens of an expert is known only when it runs",
}

ARCHITECTURE = Architecture("moe", FLAVORS, Moe, {}, PUBLISHED_ROPE, HUB, LACKS)

__all__ = ["ARCHITECTURE", "FLAVORS", "Moe", "MoeArgs"]
