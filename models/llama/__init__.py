"""The Llama family: shapes by name, and the network."""

from models.architecture import Architecture
from models.llama.flavors import FLAVORS, LlamaShape
from models.llama.model import Llama

ARCHITECTURE = Architecture("llama", FLAVORS, Llama)

__all__ = ["ARCHITECTURE", "FLAVORS", "Llama", "LlamaShape"]
