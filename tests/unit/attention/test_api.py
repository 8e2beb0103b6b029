"""Plans that cannot be made: names that are not known, and options that exclude each other."""

import pytest

from torchtitan_cp.attention import AttentionMask, LayoutError, PlanError, make_plan


def test_names_that_are_not_known_are_refused_with_those_that_are() -> None:
    with pytest.raises(PlanError, match=r"strategy 'relay' is not available; use one of auto, ring, all_gather"):
        make_plan(64, strategy="relay")
    with pytest.raises(PlanError, match=r"kernel 'metal' is not available; use one of auto, "):
        make_plan(64, kernel="metal")
    with pytest.raises(LayoutError, match=r"layout 'striped' is not available; use one of auto, contiguous"):
        make_plan(64, layout="striped")
    with pytest.raises(PlanError, match=r"kv_transfer 'int4' is not available; use one of exact, float8"):
        make_plan(64, kv_transfer="int4")


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match="use ring, all_gather or hybrid"):
        make_plan(64, ranks=2, strategy="all_to_all", kv_transfer="float8")
    with pytest.raises(PlanError, match="all_to_all_ranks = 3 does not fit strategy 'hybrid' on 4 ranks"):
        make_plan(64, ranks=4, strategy="hybrid", all_to_all_ranks=3)
    with pytest.raises(PlanError, match="rank -1 is not one of 2 ranks; give its number in the context-parallel group"):
        make_plan(64, ranks=2, rank=-1)  # as torch numbers a rank in a group that it is not in
    with pytest.raises(PlanError, match=r"window = .* has a side below -1"):
        make_plan(64, mask=AttentionMask(window=(-2, 0)))
