"""Whether a stage may end before its last step: bounds on what evaluations measure."""

from collections.abc import Mapping
from typing import NamedTuple

# Whether the value must be at least its bound, or at most.
RISES = {"passkey_accuracy": True, "validation_loss": False, "short_loss_rise": False}


class Verdict(NamedTuple):
    """Whether a stage may end, why, and the measured values by name."""

    opened: bool
    why: str
    measured: Mapping[str, float]


def judge(conditions: Mapping[str, float], measured: Mapping[str, float]) -> Verdict:
    """Whether every condition holds.

    Args:
        conditions: bounds by metric; see RISES.
        measured: the latest values.
    """
    reasons, holds = [], True
    for name, bound in conditions.items():
        value = measured.get(name)
        met = value is not None and (value >= bound if RISES[name] else value <= bound)
        holds = holds and met
        number = "not measured yet" if value is None else f"{value:.4g}"
        reasons.append(f"{name} {number}, {'at least' if RISES[name] else 'at most'} {bound:g} wanted")
    return Verdict(holds, "; ".join(reasons), {name: measured[name] for name in conditions if name in measured})
