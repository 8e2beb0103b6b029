"""Whether a stage may end before its last step: bounds on what evaluations measure."""

from collections.abc import Mapping
from typing import NamedTuple

AT_LEAST = ("passkey_accuracy",)  # metrics with a lower bound; all others have an upper one


class Verdict(NamedTuple):
    """Whether a stage may end, why, and the measured values by name."""

    opened: bool
    why: str
    measured: Mapping[str, float]


def judge(conditions: Mapping[str, float], measured: Mapping[str, float]) -> Verdict:
    """Whether every condition holds.

    Args:
        conditions: bounds by metric.
        measured: the latest values by metric.
    """
    reasons, opened = [], True
    for name, bound in conditions.items():
        value = measured.get(name)
        wanted, sign = ("at least", 1) if name in AT_LEAST else ("at most", -1)
        opened = opened and value is not None and sign * value >= sign * bound
        number = "not measured yet" if value is None else f"{value:.4g}"
        reasons.append(f"{name} {number}, {wanted} {bound:g} wanted")
    return Verdict(opened, "; ".join(reasons), {name: measured[name] for name in conditions if name in measured})
