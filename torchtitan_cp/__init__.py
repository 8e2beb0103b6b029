"""Long-context training of Llama-class models: one TOML file, 4K to 1M tokens, on a laptop or a cluster.

Each folder is one room of the house; its `__init__` says what it holds and what it may import.
Only `trainer.py` knows them all.
"""

__version__ = "0.1.0"
