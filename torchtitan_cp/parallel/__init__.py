"""Meshes and process groups, and what makes a model run on them.

Imports `attention` and `config` at most. Each function takes a mesh and plain values; `apply.py` shows their order.
"""
