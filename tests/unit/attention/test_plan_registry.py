"""Plans found by their number, as long as they or their equals live."""

import pytest

from torchtitan_cp.attention import AttentionMask, PlanError, make_plan, plan_registry
from torchtitan_cp.attention.caching import KEPT_RESULTS, host_bytes
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.plan_registry import find_plan


def test_a_plan_is_found_by_its_number_as_long_as_it_or_its_equal_lives() -> None:
    def masked(number: int) -> Plan:
        return make_plan(8192, mask=AttentionMask(document_lengths=((number, 8192 - number),)))

    plans = [masked(number) for number in range(1, KEPT_RESULTS + 100)]
    assert all(find_plan(plan.handle) is plan for plan in plans)
    others = [masked(number) for number in range(1, 50)]
    assert [int(plan.handle) for plan in others] == [int(plan.handle) for plan in plans[:49]]
    handles = [plan.handle for plan in plans]
    del plans
    assert all(find_plan(plan.handle) == plan for plan in others)
    assert find_plan(handles[-1]) == masked(KEPT_RESULTS + 99)
    for number in range(3000, 3000 + KEPT_RESULTS):
        masked(number)
    with pytest.raises(PlanError, match=f"plan {int(handles[60])} is no longer kept"):
        find_plan(handles[60])
    assert all(find_plan(plan.handle) == plan for plan in others)


def test_the_last_plans_are_kept_by_their_size_and_none_is_forgotten_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = []
    for number in range(1, 20):
        plan = make_plan(8192, mask=AttentionMask(document_lengths=((number, *[1] * 4000, 4192 - number),)))
        monkeypatch.setattr(plan_registry._kept, "budget_bytes", 5 * host_bytes((plan,)) // 2)
        handles.append(plan.handle)
        del plan
        assert [find_plan(handle).local_tokens for handle in handles[-2:]] == [8192] * len(handles[-2:])
    with pytest.raises(PlanError, match="is no longer kept"):
        find_plan(handles[0])
