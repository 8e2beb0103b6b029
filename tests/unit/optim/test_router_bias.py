"""The biases of routers follow the load of their experts."""

import torch

from torchtitan_cp.optim.router_bias import update_router_biases

RATE = 1e-3


def test_a_bias_moves_by_the_rate_towards_the_even_load_and_other_layers_are_left() -> None:
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 2**40, (4, 10), generator=generator).double()
    counts[2, :5], counts[2, 5:] = 7, 9  # the mean, 8, is no count
    counts[2, 0], counts[2, 9] = 8, 8
    biases = {layer: torch.randn(10, generator=generator) for layer in (1, 2)}
    before = {layer: bias.clone() for layer, bias in biases.items()}
    update_router_biases(biases, counts, RATE)
    for layer, bias in biases.items():
        expected = before[layer] + RATE * torch.sign(counts[layer].mean() - counts[layer]).float()
        torch.testing.assert_close(bias, expected, rtol=0, atol=1e-7)
    assert (biases[2] != before[2]).sum() == 8


def test_biases_of_even_loads_stay_bit_for_bit() -> None:
    for experts in range(1, 200):  # 1 / experts is rounded for most
        bias = torch.full((experts,), 0.1)
        update_router_biases({0: bias}, torch.full((1, experts), 1e9 + 7).double(), 0.5)
        assert (bias == 0.1).all()


def test_a_skewed_router_is_balanced_while_its_scores_stay() -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.sigmoid(torch.randn(4000, 8, generator=generator) + torch.linspace(-1.5, 1.5, 8))
    bias, loads = torch.zeros(8), []
    for _ in range(400):
        counts = (scores + bias).topk(2, -1).indices.flatten().bincount(minlength=8).double()
        update_router_biases({0: bias}, counts[None], 2e-3)
        loads.append((counts.max() / counts.mean()).item())
    assert loads[0] > 2
    assert max(loads[-20:]) < 1.1
