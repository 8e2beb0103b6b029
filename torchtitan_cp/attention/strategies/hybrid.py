"""Hybrid, on a 2-D mesh: all-to-all within a node, ring across nodes.

The inner groups trade heads for sequence (`all_to_all`, whose own ring then has a single member); the rows
of one inner group together are one member of the ring, which carries KV between the groups. Source: USP
(Fang and Zhao, 2024).
"""

from torchtitan_cp.attention.strategies import all_to_all

STRATEGY = all_to_all.STRATEGY
