"""From hidden states to new weights: the chunked loss, clipping, the optimizer and its learning rates.

Imports `attention` and `config` at most.
"""

from torchtitan_cp.optim.build import build_optimizer, set_learning_rates
from torchtitan_cp.optim.clip import scale_gradients, square_norms
from torchtitan_cp.optim.loss import ChunkedCrossEntropy, VocabularyShard, wrong_answers
from torchtitan_cp.optim.schedule import LearningRates

__all__ = [
    "ChunkedCrossEntropy",
    "LearningRates",
    "VocabularyShard",
    "build_optimizer",
    "scale_gradients",
    "set_learning_rates",
    "square_norms",
    "wrong_answers",
]
