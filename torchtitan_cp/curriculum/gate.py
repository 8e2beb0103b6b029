"""When a stage has done what it was for: conditions on what evaluations measure."""

from collections.abc import Mapping
from typing import NamedTuple

# Whether a number must come up to the bound of its condition, or down to it.
RISES = {"passkey_accuracy": True, "validation_loss": False, "short_loss_rise": False}


class Verdict(NamedTuple):
    """Whether a stage may end, and the numbers that say so: in words, and those measured by name."""

    opened: bool
    why: str
    measured: Mapping[str, float]


def judge(conditions: Mapping[str, float], measured: Mapping[str, float]) -> Verdict:
    """Whether every condition holds.

    Args:
        conditions: bounds by the name of what is measured; see RISES.
        measured: the newest numbers.
    """
    said, holds = [], True
    for name, bound in conditions.items():
        value = measured.get(name)
        met = value is not None and (value >= bound if RISES[name] else value <= bound)
        holds = holds and met
        number = "not measured yet" if value is None else f"{value:.4g}"
        said.append(f"{name} {number}, {'at least' if RISES[name] else 'at most'} {bound:g} wanted")
    return Verdict(holds, "; ".join(said), {name: measured[name] for name in conditions if name in measured})
