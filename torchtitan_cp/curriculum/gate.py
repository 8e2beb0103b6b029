"""Whether a stage may end before its last step: bounds on what evaluations measure."""

from collections.abc import Mapping
from typing import NamedTuple

AT_LEAST = ("passkey_accuracy",)  # of the others the bound is an upper one


class Verdict(NamedTuple):
    """Whether a stage may end, why, and the measured values by name."""

    opened: bool
    why: str
    measured: Mapping[str, float]


def judge(conditions: Mapping[str, float], measured: Mapping[str, float]) -> Verdict:
    """Whether every condition holds.

    Args:
        conditions: bounds by metric.
        measured: the latest values.
    """
    reasons, holds = [], True
    for name, bound in conditions.items():
        value = measured.get(name)
        wanted, sign = ("at least", 1) if name in AT_LEAST else ("at most", -1)
        holds = holds and value is not None and sign * value >= sign * bound
        number = "not measured yet" if value is None else f"{value:.4g}"
        reasons.append(f"{name} {number}, {wanted} {bound:g} wanted")
    return Verdict(holds, "; ".join(reasons), {name: measured[name] for name in conditions if name in measured})
