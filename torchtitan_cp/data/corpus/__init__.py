"""From text to tokens on disk: sources, tokenizer, cache. Imports `config` at most, and no torch."""
