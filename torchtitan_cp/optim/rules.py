"""Which rule of optimizer.groups a parameter has; apart from the optimizers, as a check of the config imports none."""

import re
from collections.abc import Iterable

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.training import ParameterGroup

NO_RULE = ParameterGroup()


def rule_of(name: str, rules: Iterable[ParameterGroup]) -> ParameterGroup:
    """The first rule of optimizer.groups whose `match` is found in a parameter's name; without one, an empty rule."""
    return next((rule for rule in rules if re.search(rule.match, name)), NO_RULE)


def check_rules(rules: tuple[ParameterGroup, ...], names: list[str]) -> None:
    """Refuse a rule of optimizer.groups that matches no parameter.

    Args:
        names: of the whole model's parameters.

    Raises:
        ConfigError: naming the rule.
    """
    used = {id(rule_of(name, rules)) for name in names}
    for index, rule in enumerate(rules):
        if id(rule) not in used:
            raise ConfigError(
                f"optimizer.groups[{index}].match = {rule.match!r} matches no parameter that an earlier rule left",
                fix=f"names are like {names[0]}, {names[len(names) // 2]}, {names[-1]}",
            )
