"""Long-context training of Llama-class models: one TOML file, 4K to 1M tokens, on a laptop or a cluster.

Each folder is one room of the house; its `__init__` says what it holds and what it may import.
`training` composes them; `planner` and `cli` stand on it.
"""

__version__ = "0.1.0"
