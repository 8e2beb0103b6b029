"""Causal language models of Hugging Face transformers, as they are."""
