"""Layers that carry a state from token to token instead of keys: a gated delta rule, and a short convolution.

Both follow the documents and the layout of any plan. Models call operator.py and convolution.py; kernel.py computes one
rank's rows, and states.py passes states between ranks.
"""
