"""Hidden states, labels and losses over full logits, and how large a tensor is made on the way."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.optim.loss import ChunkedCrossEntropy, VocabularyShard


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(2, 37, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 50, (2, 37))
    labels[0, :5] = IGNORED
    labels[1, 20] = IGNORED
    return hidden, weight, labels


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf.numel() for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *leaves, 0)
        return result


def largest_tensor(tokens: int, weight: Tensor, vocabulary: VocabularyShard | None = None) -> int:
    hidden = torch.randn(1, tokens, 8, requires_grad=True)
    with LargestTensor() as largest:
        labels = torch.zeros(1, tokens, dtype=torch.int64)
        ChunkedCrossEntropy(16)(hidden, weight, labels, vocabulary=vocabulary)[0].backward()
        with torch.no_grad():
            ChunkedCrossEntropy(16)(hidden, weight, labels, vocabulary=vocabulary)
    return largest.elements


def sums_over_full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and squared logsumexp, summed over the tokens that count."""
    logits = hidden @ weight.t()
    pure = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return pure, logits.logsumexp(-1).square()[labels != IGNORED].sum()
