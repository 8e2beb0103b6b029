"""Measures of what was learned, on held-out text: prompts to answer, and how long looking may take.

Imports `config` at most. `evaluation.__main__` is a program of its own, which knows the rooms.
"""

from torchtitan_cp.evaluation.budget import Budget
from torchtitan_cp.evaluation.evaluated import Evaluated
from torchtitan_cp.evaluation.prompts import Prompt, PromptWriter, Wording
from torchtitan_cp.evaluation.retrieval import Retrieval
from torchtitan_cp.evaluation.unigram import unigram_loss
from torchtitan_cp.evaluation.validation import evaluating

__all__ = ["Budget", "Evaluated", "Prompt", "PromptWriter", "Retrieval", "Wording", "evaluating", "unigram_loss"]
