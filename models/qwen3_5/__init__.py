"""Qwen3.5, a hybrid of gated delta nets and full attention: sizes by name, and the model."""

from models.architecture import Architecture
from models.qwen3_5.flavors import FLAVORS, HybridArgs
from models.qwen3_5.hub import HUB
from models.qwen3_5.model import Hybrid

LACKS = {"parallel.tp": "the heads of its gated delta nets are not sharded over tensor-parallel ranks"}

ARCHITECTURE = Architecture("qwen3_5", FLAVORS, Hybrid, {}, HUB, LACKS)

__all__ = ["ARCHITECTURE", "FLAVORS", "Hybrid", "HybridArgs"]
