"""Gates: every condition has to hold, and the reason says what was looked at."""

import pytest

from torchtitan_cp.curriculum import judge
from torchtitan_cp.curriculum.gate import Verdict


@pytest.mark.parametrize(
    ("conditions", "measured", "opened", "why"),
    [
        ({"validation_loss": 2.0}, {"validation_loss": 2.0}, True, "validation_loss 2, at most 2 wanted"),
        ({"validation_loss": 2.0}, {"validation_loss": 2.1}, False, "validation_loss 2.1, at most 2 wanted"),
        ({"passkey_accuracy": 0.9}, {"passkey_accuracy": 0.95}, True, "passkey_accuracy 0.95, at least 0.9 wanted"),
        ({"passkey_accuracy": 0.9}, {}, False, "passkey_accuracy not measured yet, at least 0.9 wanted"),
        (
            {"validation_loss": 2.0, "short_loss_rise": 0.02},
            {"validation_loss": 1.9, "short_loss_rise": 0.03},
            False,
            "validation_loss 1.9, at most 2 wanted; short_loss_rise 0.03, at most 0.02 wanted",
        ),
    ],
)
def test_a_gate_opens_when_every_condition_holds(
    conditions: dict[str, float], measured: dict[str, float], opened: bool, why: str
) -> None:
    assert judge(conditions, measured) == Verdict(opened, why, measured)
