"""Parameter groups, implementations, and where the state is kept."""

import importlib
import logging
import re
from typing import Any

import pytest
import torch

from tests.support.small_net import assert_same, names_of, small_net, train, weights
from torchtitan_cp.config import ConfigError, names
from torchtitan_cp.config.sections import Optimizer, ParameterGroup
from torchtitan_cp.optim.build import build_optimizer, set_learning_rates
from torchtitan_cp.optim.offload import keep_state_on_host
from torchtitan_cp.optim.optimizers import OPTIMIZERS
from torchtitan_cp.optim.rules import check_rules


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


@pytest.mark.parametrize("rules", [("nrom",), ("norm", "norm.weight")])
def test_a_rule_that_matches_nothing_is_refused_by_name(rules: tuple[str, ...]) -> None:
    index, last = len(rules) - 1, rules[-1]
    with pytest.raises(ConfigError) as caught:
        check_rules(tuple(map(ParameterGroup, rules)), [name for name, _ in small_net().named_parameters()])
    assert f"optimizer.groups[{index}].match = '{last}' matches no parameter that an earlier rule" in str(caught.value)
    assert "names are like tok_embeddings.weight, layers.0.bias, norm.weight" in str(caught.value)


def test_a_rule_for_another_pipeline_stage_is_not_refused() -> None:
    settings = Optimizer(groups=(ParameterGroup("output"),))
    check_rules(settings.groups, ["tok_embeddings.weight", "output.weight"])
    build_optimizer(small_net(), settings)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"name": "muon"},
        {"groups": (ParameterGroup("norm", 0.1, 0.2),)},
    ],
    ids=["adamw", "muon", "groups"],
)
def test_state_kept_on_the_host_changes_no_step_and_is_fetched_a_parameter_at_a_time(options: dict[str, Any]) -> None:
    model, twin = small_net(), small_net()
    optimizer, other = (build_optimizer(m, Optimizer(**options)) for m in (model, twin))
    taken: list[list[int]] = []
    optimizer.register_step_pre_hook(lambda *_: taken.append([len(g["params"]) for g in optimizer.param_groups]))
    keep_state_on_host(optimizer, OPTIMIZERS[options.get("name", "adamw")].parts)
    groups = optimizer.param_groups
    for _ in range(3):
        train(model, optimizer, 1)
        train(twin, other, 1)
        assert_same(weights(model), weights(twin), rtol=0)
    assert optimizer.param_groups is groups
    assert taken == [[1]] * 3 * len(weights(model))
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        for name, value in other.state[its].items():
            assert torch.equal(optimizer.state[mine][name], value), name


def test_offloading_says_that_it_is_inactive_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build_optimizer(small_net(), Optimizer(offload_state=True))
    assert "optimizer.offload_state is inactive" in caplog.text


def test_a_missing_torchao_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module

    def missing(name: str) -> Any:
        if name.startswith("torchao"):
            raise ImportError(name)
        return found(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=re.escape("pip install 'torchtitan-cp[float8]'")):
        build_optimizer(small_net(), Optimizer(state="8bit"))


def test_config_and_registry_name_the_same_optimizers() -> None:
    assert tuple(OPTIMIZERS) == names.OPTIMIZERS
