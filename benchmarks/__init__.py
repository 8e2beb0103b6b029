"""Measurements run by hand: `python -m benchmarks.ring` and its neighbours. Each prints the table it makes."""
