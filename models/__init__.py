"""Architectures as plain modules: torch and nothing of ours. They know no ranks.

`ARCHITECTURES` is what the entry points hand to the trainer's registry.
"""

from models.huggingface import ARCHITECTURE as HUGGINGFACE
from models.llama import ARCHITECTURE as LLAMA
from models.moe import ARCHITECTURE as MOE
from models.qwen3_5 import ARCHITECTURE as QWEN3_5

ARCHITECTURES = (LLAMA, MOE, QWEN3_5, HUGGINGFACE)

__all__ = ["ARCHITECTURES"]
