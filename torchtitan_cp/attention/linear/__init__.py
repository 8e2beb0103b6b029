"""Layers that carry a state from token to token instead of keys: a gated delta rule, and a short convolution.

Both follow a plan's documents and layout, whatever it is. kernel.py computes one rank's rows, states.py takes states
across ranks, operator.py and convolution.py are what a model calls.
"""
