"""Parameter groups: which decay, and which rule takes a parameter."""

import pytest
import torch

from tests.support.small_net import names_of, small_net
from torchtitan_cp.config.training import Optimizer, ParameterGroup
from torchtitan_cp.optim.build import build_optimizer, set_learning_rates


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = small_net()
    decaying, plain = build_optimizer(model, Optimizer(weight_decay=0.3)).param_groups
    assert decaying["weight_decay"] == 0.3
    assert plain["weight_decay"] == 0.0
    assert names_of(model, decaying) == {"tok_embeddings.weight", "layers.0.weight", "layers.1.weight"}
    assert names_of(model, plain) == {"layers.0.bias", "norm.weight"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_biases_of_experts_and_norms_of_heads_are_no_matrices_though_they_have_two_dims(name: str) -> None:
    model = small_net()
    model.layers[0].gate_up_proj_bias = torch.nn.Parameter(torch.zeros(4, 6))
    model.layers[0].q_norm = torch.nn.LayerNorm((4, 6), bias=False)
    groups = build_optimizer(model, Optimizer(name=name, weight_decay=0.3)).param_groups
    others = [names_of(model, group) for group in groups if group["weight_decay"] == 0.0 and not group.get("muon")]
    assert {"layers.0.gate_up_proj_bias", "layers.0.q_norm.weight"} <= set.union(*others)


def test_the_first_rule_that_matches_a_parameter_rules_it() -> None:
    model = small_net()
    rules = (ParameterGroup("^tok|norm", 0.1, 0.0), ParameterGroup("weight", 2.0), ParameterGroup("bias"))
    optimizer = build_optimizer(model, Optimizer(lr=0.5, weight_decay=0.3, groups=rules))
    found = {
        (group["lr"], group["lr_scale"], group["weight_decay"]): names_of(model, group)
        for group in optimizer.param_groups
    }
    assert found == {
        (0.05, 0.1, 0.0): {"tok_embeddings.weight", "norm.weight"},
        (1.0, 2.0, 0.3): {"layers.0.weight", "layers.1.weight"},
        (0.5, 1.0, 0.0): {"layers.0.bias"},
    }
    set_learning_rates(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.5, 0.25]
