"""From a corpus to packed sequences: find the text, tokenize it once onto disk, read it from any cursor.

May import `config` and `attention` at most; ranks and degrees are integers here, never groups. Only
`batches.micro_batches` and `batches.loader` import torch, so that checking a config stays cheap.
"""
