"""What attention gives a model: a place for its own losses."""

import torch

from torchtitan_cp.training.model import LayerAttention


def test_a_loss_of_the_model_is_divided_by_the_tokens_of_the_step_and_leaves_the_hidden_states() -> None:
    attend = LayerAttention()
    attend.step_tokens = torch.tensor(8)
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    out = attend.add_loss(hidden, weight.square() + hidden.sum())
    assert torch.equal(out, hidden)
    out.backward(torch.full((2, 3), 7.0))
    assert weight.grad == 10 * 0.125
    assert torch.equal(hidden.grad, torch.full((2, 3), 7.125))
