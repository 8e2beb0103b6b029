"""Products that a block keeps where it is recomputed."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from torchtitan_cp.parallel.activation import _is_kept, _saving_contexts, recomputed, tiled


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


@pytest.mark.parametrize("gathers", [False, True])
def test_a_tile_runs_once_more_for_its_backward_and_not_with_its_block(gathers: bool) -> None:
    """Unless FSDP gathers its weights: then all tiles but the last run with the block too."""
    tokens, tiles = 16, 8
    x, weight = torch.randn(2, tokens, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    passes = 0.0

    def mlp(hidden: Tensor) -> Tensor:
        nonlocal passes
        passes += hidden.shape[1] / tokens
        return torch.tanh(hidden @ leaves[1])

    def block(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return x + run(torch.sin(x))

    gradients = []
    for run in (mlp, tiled(mlp, tiles, gathers=gathers)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        passes = 0.0
        out = recomputed(partial(block, run))(leaves[0])
        (out**2).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert passes == (2 + (tiles - 1) / tiles if gathers else 2)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


def test_weights_of_tiles_learn_where_their_input_needs_no_gradient() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    tiled(lambda x: x @ weight, 2)(torch.ones(1, 4, 4)).sum().backward()
    assert weight.grad is not None
    assert (weight.grad == 4).all()
