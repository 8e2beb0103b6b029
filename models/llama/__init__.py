"""The Llama family: sizes by name, and the model."""

from models.architecture import Architecture
from models.llama.flavors import FLAVORS, LlamaArgs
from models.llama.hub import HUB
from models.llama.model import Llama
from models.llama.sharding import SHARDING

ARCHITECTURE = Architecture("llama", FLAVORS, Llama, SHARDING, HUB)

__all__ = ["ARCHITECTURE", "FLAVORS", "SHARDING", "Llama", "LlamaArgs"]
