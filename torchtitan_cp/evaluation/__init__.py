"""What was learned, measured on held-out text: losses, prompts to answer, and how much time measuring may take.

Imports `config` at most.
"""

from torchtitan_cp.evaluation.budget import Budget
from torchtitan_cp.evaluation.prompts import Prompt, PromptWriter, Wording
from torchtitan_cp.evaluation.result import EvaluationResult, Retrieval
from torchtitan_cp.evaluation.unigram import unigram_loss
from torchtitan_cp.evaluation.validation import evaluating

__all__ = [
    "Budget",
    "EvaluationResult",
    "Prompt",
    "PromptWriter",
    "Retrieval",
    "Wording",
    "evaluating",
    "unigram_loss",
]
