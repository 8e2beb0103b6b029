"""Devices, the launcher, the start of ranks, nodes, the run folder's lock, watchdog, stop signals, agreement of ranks.

Imports `config` at most.
"""
