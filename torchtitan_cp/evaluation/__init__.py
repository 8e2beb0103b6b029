"""Measures of what was learned, on held-out text. Imports `config` at most."""

from torchtitan_cp.evaluation.unigram import unigram_loss
from torchtitan_cp.evaluation.validation import mean_loss

__all__ = ["mean_loss", "unigram_loss"]
