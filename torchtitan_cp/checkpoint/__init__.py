"""Saving and resuming: complete or absent, the newest intact one is found, resharded to any number of ranks.

`manager` saves, finds, loads and deletes a run's checkpoints; `save` writes one, `manifest` verifies one
(`verify_checkpoint`), `load` reads one without running any code in it; `weights` opens a finished model; `hub` reads
and writes Hugging Face's format. Imports `attention` and `config` at most.
"""
