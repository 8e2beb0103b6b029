"""What a model learned, measured on held-out text: losses, prompts to answer, and the time this may take.

Imports `config` at most.
"""

from torchtitan_cp.evaluation.held_out import Budget, evaluating, unigram_loss
from torchtitan_cp.evaluation.prompts import Frame, Prompt, PromptWriter
from torchtitan_cp.evaluation.result import EvaluationResult, Retrieval

__all__ = ["Budget", "EvaluationResult", "Frame", "Prompt", "PromptWriter", "Retrieval", "evaluating", "unigram_loss"]
