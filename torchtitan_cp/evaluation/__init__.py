"""What a model learned, measured on held-out text: losses, prompts to answer, and the time this may take.

Imports `config` at most.
"""
