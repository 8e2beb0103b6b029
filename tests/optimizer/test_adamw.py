"""Parameter groups."""

from torch import nn

from torchtitan_cp.config.sections import Optimizer
from torchtitan_cp.optimizer import build_optimizer


def small_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3), nn.RMSNorm(3))


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    decaying, plain = build_optimizer(small_model(), Optimizer(weight_decay=0.3)).param_groups
    assert decaying["weight_decay"] == 0.3
    assert plain["weight_decay"] == 0.0
    assert all(p.ndim == 2 for p in decaying["params"])
    assert [tuple(p.shape) for p in plain["params"]] == [(3,), (3,)]
