"""Measurements run by hand: `python -m benchmarks --help` lists them. Each prints the table it makes."""
