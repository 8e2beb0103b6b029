"""Devices, the launcher, the start of ranks, the watchdog, stop signals, and consistency between ranks.

Imports `config` at most.
"""
