"""Matrices of many shapes, and Muon's steps on them along known gradients."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_cp.config.training import Optimizer
from torchtitan_cp.optim.build import set_learning_rates

SETTINGS = Optimizer(name="muon", lr=0.02, weight_decay=0.1)


class Net(nn.Module):
    """Five tall and wide matrices, some uneven on ranks, between an embedding and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(8, 12), nn.Linear(12, 8, bias=False)
        sizes = ((12, 20), (20, 12), (12, 14), (14, 20), (20, 13))
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)


class Experts(nn.Module):
    """Six experts, each two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(6, 12, 20)), nn.Parameter(torch.randn(6, 20, 12))


class NetWithExperts(Net):
    """Net with a layer of experts, and one with a convolution, which has three dims too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers += [Experts(), nn.Conv1d(4, 4, 4)]

    @property
    def experts(self) -> dict[int, nn.Module]:
        return {5: self.layers[5]}


def small_net(net: type[Net] = Net) -> Net:
    torch.manual_seed(1)
    return net()


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    """Steps along known gradients, sharded as their parameters. Returns the whole weights."""
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), gradients(model, step), strict=True):
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
            parameter.grad = gradient
        set_learning_rates(optimizer, SETTINGS.lr / (step + 1))
        optimizer.step()
        optimizer.zero_grad()
    tensors = (p.detach() for p in model.parameters())
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in tensors]
