"""A small net with the outline of a model, and steps of an optimizer on it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_cp.optim.build import set_learning_rates


class Net(nn.Module):
    """The outline of a model: something to embed, blocks, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 6, bias=False)])
        self.norm = nn.RMSNorm(6)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        return self.norm(hidden + self.layers[1](self.layers[0](hidden).tanh()))


def small_net() -> Net:
    torch.manual_seed(1)
    return Net()


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    return {name for name, p in model.named_parameters() if any(p is held for held in group["params"])}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        tokens = torch.tensor([[step, 1, 2, 6]])
        (model(tokens) * torch.arange(6.0)).sum().backward()
        set_learning_rates(optimizer, 0.01)
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    tensors = (p.detach() for p in model.parameters())
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in tensors]


def assert_same(one: list[Tensor], other: list[Tensor], rtol: float = 1e-5) -> None:
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=1e-7)
