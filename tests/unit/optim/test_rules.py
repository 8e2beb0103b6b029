"""Rules for parameters that match none."""

import pytest

from tests.support.small_net import small_net
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.training import Optimizer, ParameterGroup
from torchtitan_cp.optim.build import build_optimizer
from torchtitan_cp.optim.rules import check_rules


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
