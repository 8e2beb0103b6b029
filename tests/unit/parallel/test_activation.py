"""Products that a block keeps where it is recomputed."""

from functools import partial

import pytest
import torch
from torch import Tensor

from torchtitan_cp.parallel.activation import _is_kept, _saving_contexts, recomputed


def test_a_kept_product_that_is_written_to_behind_its_block_is_an_error_and_so_is_a_second_backward() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8)
    contexts = partial(_saving_contexts, partial(_is_kept, "selective"), None)

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ weight
        return product, torch.sin(2 * product)

    product, other = recomputed(block, contexts)(x)
    product.mul_(3.0)
    with pytest.raises(RuntimeError, match="kept for its backward, was written to in place"):
        (product + other).sum().backward()
    product, other = recomputed(block, contexts)(x)
    other.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs twice"):
        other.sum().backward()
