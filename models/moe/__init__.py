"""A mixture of experts on Llama's attention, in the args of Qwen3-MoE and OLMoE: shapes by name, and the network."""

from models.architecture import Architecture
from models.moe.flavors import FLAVORS, PUBLISHED_ROPE, MoeArgs
from models.moe.hub import HUB
from models.moe.model import Moe

# What the balance of the experts keeps it from; models/architecture.py says how these are told.
LACKS = {
    "parallel.tp": "its experts are not dealt out over tensor-parallel ranks",
    "parallel.pp": "the balance of the experts in all layers enters the loss, which only the last stage has",
    "compile.enable": "how many tokens an expert has is known only when it runs",
}

ARCHITECTURE = Architecture("moe", FLAVORS, Moe, {}, PUBLISHED_ROPE, HUB, LACKS)

__all__ = ["ARCHITECTURE", "FLAVORS", "Moe", "MoeArgs"]
