"""A mixture of experts on Llama's attention, with the routers of Qwen3-MoE, OLMoE and DeepSeek-V3."""

from models.architecture import Architecture
from models.moe.flavors import FLAVORS, MoeArgs
from models.moe.hub import HUB
from models.moe.model import Moe
from models.moe.sharding import SHARDING

ARCHITECTURE = Architecture("moe", FLAVORS, Moe, SHARDING, HUB)

__all__ = ["ARCHITECTURE", "FLAVORS", "Moe", "MoeArgs"]
