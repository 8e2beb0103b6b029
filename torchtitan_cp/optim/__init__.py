"""From hidden states to new weights: the chunked loss, clipping, the optimizer and its learning rates.

Imports `attention` and `config` at most.
"""
