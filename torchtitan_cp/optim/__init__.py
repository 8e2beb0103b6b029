"""From hidden states to new weights: the chunked loss, clipping, the optimizer and its learning rates.

Imports `attention` and `config` at most.
"""

from torchtitan_cp.optim.build import build_optimizer, set_learning_rates
from torchtitan_cp.optim.clip import scale_gradients, square_norms
from torchtitan_cp.optim.loss import TokenLoss, VocabularyShard, chunked_cross_entropy, wrong_answers
from torchtitan_cp.optim.schedule import LearningRates

__all__ = [
    "LearningRates",
    "TokenLoss",
    "VocabularyShard",
    "build_optimizer",
    "chunked_cross_entropy",
    "scale_gradients",
    "set_learning_rates",
    "square_norms",
    "wrong_answers",
]
