"""The composition: what a run is made of, the loop, and the proof that its parallelism changes nothing.

Knows every room and no command; takes a model by its name from `registry`.
"""
