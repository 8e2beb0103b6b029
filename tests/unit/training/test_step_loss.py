"""Losses as sums over counts, against autograd on the quotient."""

import pytest
import torch

from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.optim.loss import ChunkedCrossEntropy
from torchtitan_cp.training.step_loss import LossHead, add_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_is_added_has_the_gradient_of_its_sum_over_its_count(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(5, dtype=dtype, requires_grad=True) for _ in range(2))
    out = add_loss(x.sin(), (x * weight).square().sum(), torch.tensor(7))
    assert torch.equal(out, x.sin())
    got = torch.autograd.grad(out.sum(), (x, weight))
    want = torch.autograd.grad(x.sin().sum() + (x * weight).square().sum() / 7, (x, weight))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_head_has_the_gradients_of_the_weighted_sum_over_the_divisor(weighted: bool) -> None:
    hidden, output = torch.randn(2, 6, 4, requires_grad=True), torch.nn.Linear(4, 9, bias=False)
    labels = torch.randint(9, (2, 6))
    labels[:, ::3] = IGNORED
    weights = torch.rand(2, 6) if weighted else None
    head = LossHead(ChunkedCrossEntropy(4), labels, weights, torch.tensor(5))
    got = torch.autograd.grad(head(hidden, output), (hidden, output.weight))
    losses = torch.nn.functional.cross_entropy(
        output(hidden).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(2, 6)
    total = (losses * (1 if weights is None else weights)).sum()
    for ours, theirs in zip(got, torch.autograd.grad(total / 5, (hidden, output.weight)), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(head.losses, losses.detach())
    torch.testing.assert_close(head.weighted_sum(), total.detach())
